//! Advice for command lines that clap refuses: near misses that are near, and values of a config where people look for flags.

use std::ffi::OsString;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use crossmesh_train::config::{keys::KEYS, nearest};

/// The error with advice that helps, or with none: `--svg` is not meant as a value, and `--set` is no `--steps`.
pub fn better(mut error: clap::Error, words: &[OsString]) -> clap::Error {
    if error.kind() != ErrorKind::UnknownArgument {
        return error;
    }
    let text = |error: &clap::Error, kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.clone()),
        _ => None,
    };
    let asked = text(&error, ContextKind::InvalidArg).unwrap_or_default();
    let meant = text(&error, ContextKind::SuggestedArg);
    if meant.as_ref().is_none_or(|meant| !is_near(&asked, meant)) {
        error.remove(ContextKind::Suggested);
        error.remove(ContextKind::SuggestedArg);
        error.remove(ContextKind::Usage);
    }
    if words.iter().any(|word| word == "train")
        && let Some(key) = key_of(&asked)
    {
        error.remove(ContextKind::SuggestedArg);
        let tip = format!("values of the config are set by key: --set {key}=VALUE");
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![StyledStr::from(tip)]));
    }
    error
}

/// Whether somebody who typed one may have meant the other.
fn is_near(asked: &str, meant: &str) -> bool {
    let (asked, meant) = (bare(asked), bare(meant));
    nearest(asked, [meant]).is_some() || asked.starts_with(meant) || meant.starts_with(asked)
}

/// `train.steps` of `--steps`, `--train.steps` or `--train-steps`.
fn key_of(asked: &str) -> Option<String> {
    let word = bare(asked);
    // Of stages there are several: which one, a flag would not say.
    let mut paths = KEYS.iter().filter(|key| key.section != "stage").map(|key| key.path());
    paths.find(|path| {
        let last = path.rsplit('.').next().unwrap_or(path);
        [path.as_str(), last]
            .iter()
            .any(|name| name.replace(['.', '_'], "-") == word.replace(['.', '_'], "-"))
    })
}

fn bare(flag: &str) -> &str {
    flag.trim_start_matches('-').split('=').next().unwrap_or(flag)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn said(line: &str) -> String {
        let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
        let error = crate::Cli::try_parse_from(&words).unwrap_err();
        better(error, &words).render().to_string()
    }

    #[test]
    fn what_is_near_is_named() {
        for (line, meant) in [
            ("crossmesh explain a b --svgx f", "'--svg'"),
            ("crossmesh schedule 1f1b --stages 4 --microbatch 8", "'--microbatches'"),
            ("crossmesh simulate p.json --latencies 3us", "'--latency'"),
            ("crossmesh train x.toml --resume-from y", "'--resume'"),
        ] {
            assert!(said(line).contains(meant), "{}", said(line));
        }
    }

    #[test]
    fn what_is_not_near_is_not() {
        for line in [
            "crossmesh train x.toml --perfetto t",
            "crossmesh diff a.json b.json --svg f",
            "crossmesh run a b --svg f",
            "crossmesh verify p.json --chart",
        ] {
            assert!(!said(line).contains("tip:"), "{}", said(line));
        }
    }

    #[test]
    fn values_of_a_config_are_pointed_to() {
        for (line, key) in [
            ("crossmesh train x.toml --steps 10", "--set train.steps=VALUE"),
            ("crossmesh train x.toml --learning-rate 1e-3", "--set optimizer.learning_rate=VALUE"),
            ("crossmesh train x.toml --batch=4", "--set train.batch=VALUE"),
        ] {
            let said = said(line);
            assert!(said.contains(key) && !said.contains("similar argument"), "{said}");
        }
        assert!(!said("crossmesh explain a b --steps 3").contains("--set"));
    }
}
