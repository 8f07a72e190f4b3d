//! A stream of ids as samples of a language model.
//!
//! The stream is cut into windows of `context` ids; a window's targets are the ids one further on. The stream's tail is for validation, and
//! no id is in both parts:
//!
//! ```text
//! ids       0 1 2 3 4 5 6 7 8 9 | a b c d e
//! windows  [0 1 2][3 4 5][6 7 8]|[a b c]         context 3
//! targets  [1 2 3][4 5 6][7 8 9]|[b c d]
//!           training              validation
//! ```
//!
//! Training goes through its windows in another order every epoch; validation in the order of the stream.

use std::ops::Range;

use super::file::{ForeignFile, TokenFile};
use super::order::Order;
use super::text::{Text, names};
use super::{Column, DataError, DataSet, Feature, Kind, Split, no_port};

/// How a stream becomes samples.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WindowSpec {
    /// Ids of a sample.
    pub context: usize,
    /// The part of the stream that is never trained on; 0 or more, and less than 1.
    pub validation_share: f64,
    pub seed: u64,
}

/// Where ids come from.
#[derive(Debug)]
pub enum Source {
    Text(Text),
    File(TokenFile),
    Foreign(ForeignFile),
}

impl Source {
    /// A token file: ours, or another program's.
    pub fn open(path: &std::path::Path) -> Result<Self, DataError> {
        match ForeignFile::is_meant(path) {
            true => Ok(Self::Foreign(ForeignFile::open(path)?)),
            false => Ok(Self::File(TokenFile::open(path)?)),
        }
    }
}

/// Windows of a stream.
#[derive(Debug)]
pub struct Tokens {
    source: Source,
    spec: WindowSpec,
    training: Windows,
    validation: Windows,
    order: Order,
}

/// Windows in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Windows {
    /// The first id.
    start: u64,
    count: u64,
}

impl Tokens {
    pub fn new(source: Source, spec: WindowSpec) -> Result<Self, DataError> {
        if spec.context == 0 {
            return Err(DataError::value("context", 0, "a sample has tokens", "use 1 or more"));
        }
        if !(0.0..1.0).contains(&spec.validation_share) {
            let (key, hint) = ("validation_share", "use 0 or more, and less than 1");
            return Err(DataError::value(key, spec.validation_share, "it is a part of the tokens", hint));
        }
        if source.vocab() > i32::MAX as u64 {
            let reason = "token ids are 31 bits wide";
            return Err(DataError::value("vocab", source.vocab(), reason, "take a smaller tokenizer"));
        }
        let held_out = (source.len() as f64 * spec.validation_share) as u64;
        let cut = source.len().saturating_sub(held_out);
        let training = windows(&source, 0..cut, spec.context, "training")?;
        let validation = match held_out {
            0 if spec.validation_share == 0.0 => Windows { start: cut, count: 0 },
            _ => windows(&source, cut..source.len(), spec.context, "validation")?,
        };
        let order = Order::new(spec.seed, training.count);
        Ok(Self { source, spec, training, validation, order })
    }

    /// The first id of a sample.
    pub(super) fn start(&self, sample: u64, split: Split) -> Result<u64, DataError> {
        let (windows, item) = match split {
            Split::Training => (self.training, self.order.item(sample)),
            Split::Validation if self.validation.count > 0 => {
                (self.validation, sample % self.validation.count)
            }
            Split::Validation => {
                let (reason, hint) = ("nothing is held out for validation", "use 0.1, say");
                return Err(DataError::value("validation_share", self.spec.validation_share, reason, hint));
            }
        };
        Ok(windows.start + item * self.spec.context as u64)
    }
}

/// The windows of a part of the stream.
fn windows(
    source: &Source,
    part: Range<u64>,
    context: usize,
    what: &'static str,
) -> Result<Windows, DataError> {
    let tokens = part.end - part.start;
    // Every window has a target behind its last id.
    let count = tokens.saturating_sub(1) / context as u64;
    if count == 0 {
        let hint = "take more text, a shorter context, or another validation_share";
        let (data, wanted) = (source.describe(), context as u64 + 1);
        return Err(DataError::TooShort { data, tokens, what, wanted, hint });
    }
    Ok(Windows { start: part.start, count })
}

impl Source {
    fn len(&self) -> u64 {
        match self {
            Self::Text(text) => text.ids.len() as u64,
            Self::File(file) => file.header().tokens,
            Self::Foreign(file) => file.tokens(),
        }
    }

    fn vocab(&self) -> u64 {
        match self {
            Self::Text(text) => text.vocab as u64,
            Self::File(file) => file.header().vocab,
            Self::Foreign(file) => file.vocab(),
        }
    }

    fn read(&self, ids: Range<u64>) -> Result<Vec<u32>, DataError> {
        match self {
            Self::Text(text) => Ok(text.ids.get(ids.start as usize..ids.end as usize)),
            Self::File(file) => file.read(ids),
            Self::Foreign(file) => file.read(ids),
        }
    }

    fn describe(&self) -> String {
        match self {
            Self::Text(text) => names(&text.inputs),
            Self::File(file) => file.path().display().to_string(),
            Self::Foreign(file) => file.path().display().to_string(),
        }
    }
}

impl DataSet for Tokens {
    fn features(&self) -> Vec<Feature> {
        let kind = Kind::Ids { classes: self.source.vocab() as usize };
        ["tokens", "targets"].map(|port| Feature { port, dims: vec![self.spec.context], kind }).to_vec()
    }

    fn num_samples(&self, split: Split) -> Option<u64> {
        Some(match split {
            Split::Training => self.training.count,
            Split::Validation => self.validation.count,
        })
    }

    fn read(&self, port: &str, samples: Range<u64>, split: Split) -> Result<Column, DataError> {
        let shift = match port {
            "tokens" => 0,
            "targets" => 1,
            _ => return Err(no_port(self, port)),
        };
        let mut column = Vec::with_capacity((samples.end - samples.start) as usize * self.spec.context);
        for sample in samples {
            let start = self.start(sample, split)? + shift;
            let ids = self.source.read(start..start + self.spec.context as u64)?;
            // Below the vocabulary, which fits.
            column.extend(ids.into_iter().map(|id| id as i32));
        }
        Ok(Column::Ids(column))
    }

    fn describe(&self) -> String {
        self.source.describe()
    }
}
