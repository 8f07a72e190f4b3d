//! Words that a shell may complete, where other words are welcome too.
//!
//! A suite is a name of ours or a file; a strategy has a better error than clap's. So nothing is refused here: the words are for
//! completions alone.

use std::ffi::OsStr;

use clap::builder::{PossibleValue, StringValueParser, TypedValueParser};
use crossmesh_core::reshard::Strategy;
use crossmesh_core::schedule::Name;

use crate::pipeline::Series;

/// Takes any text; these words are offered.
#[derive(Clone)]
pub struct Known(pub fn() -> Vec<&'static str>);

impl TypedValueParser for Known {
    type Value = String;

    fn parse_ref(
        &self,
        command: &clap::Command,
        argument: Option<&clap::Arg>,
        value: &OsStr,
    ) -> Result<String, clap::Error> {
        StringValueParser::new().parse_ref(command, argument, value)
    }

    fn possible_values(&self) -> Option<Box<dyn Iterator<Item = PossibleValue> + '_>> {
        Some(Box::new((self.0)().into_iter().map(PossibleValue::new)))
    }
}

pub fn strategies() -> Vec<&'static str> {
    let all = Strategy::CONCRETE.into_iter().chain([Strategy::Auto]);
    all.map(|strategy| strategy.name()).collect()
}

pub fn schedules() -> Vec<&'static str> {
    Name::ALL.map(|name| name.name()).to_vec()
}

pub fn all_series() -> Vec<&'static str> {
    Series::names()
}

pub fn suites() -> Vec<&'static str> {
    crate::suite::BUILT_IN.iter().map(|(name, _)| *name).collect()
}

pub fn dtypes() -> Vec<&'static str> {
    crate::commands::bench::collective::DTYPES.map(|dtype| dtype.name()).to_vec()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn a_shell_completes_words_of_ours() {
        let mut script = Vec::new();
        let mut command = crate::Cli::command();
        clap_complete::generate(clap_complete::Shell::Bash, &mut command, "crossmesh", &mut script);
        let script = String::from_utf8(script).unwrap();
        for words in ["sendrecv allgather", "gpipe 1f1b eager-1f1b", "paper modern uneven", "f32 f64 bf16"] {
            assert!(script.contains(words), "{words}");
        }
    }
}
