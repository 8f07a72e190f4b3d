//! Megatron's pipeline layout strings (`--pipeline-model-parallel-layout`): which layers each virtual stage has.
//!
//! ```
//! use crossmesh_core::schedule::megatron::Layers;
//! let layers: Layers = "Et*3|(tt|)*29,m|L".parse().unwrap();
//! assert_eq!(layers.stages().len(), 32);
//! assert_eq!(layers.stages()[0], "Ettt");
//! ```
//! `E` is the embedding, `t` a transformer layer, `m` a multi-token-prediction layer, `L` the loss; `|` ends a stage, `x*3` and
//! `(xy|)*3` repeat, commas mean nothing, and stages may be empty. Stages go to devices round robin.

use std::str::FromStr;

use super::{MAX_STAGES, StageCost};

/// More layers than this is taken for a typing mistake.
pub const MAX_LAYERS: usize = 1 << 20;

/// The layers of every virtual stage, in model order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers {
    stages: Vec<String>,
}

/// Why a text is no layout.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayersError {
    #[error(
        "`{what}` at {at} is no layer\nhint: layers are E (embedding), t (transformer), m (prediction of more tokens) and L (loss); | ends a stage"
    )]
    NoLayer { what: char, at: usize },
    #[error(
        "the bracket at {at} is not closed, or not followed by `*` and a number\nhint: repeat with (tt|)*3"
    )]
    Bracket { at: usize },
    #[error("`*` at {at} needs something to repeat before it and a number behind it")]
    Repeat { at: usize },
    #[error("the layout is longer than {limit} layers")]
    TooLong { limit: usize },
    #[error("the layout has no {what}")]
    Missing { what: &'static str },
    #[error("the {what} is not the {place} layer, and there once")]
    Misplaced { what: &'static str, place: &'static str },
    #[error("{stages} stages cannot be dealt out to {devices} devices evenly")]
    Uneven { stages: usize, devices: u32 },
}

/// What a layer of each kind costs, in units of a transformer layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerWeights {
    pub embedding: f64,
    pub transformer: f64,
    pub prediction: f64,
    pub loss: f64,
}

impl Default for LayerWeights {
    fn default() -> Self {
        Self { embedding: 0.0, transformer: 1.0, prediction: 1.0, loss: 0.0 }
    }
}

impl Layers {
    /// The letters of every stage.
    pub fn stages(&self) -> &[String] {
        &self.stages
    }

    /// Chunks for every device.
    pub fn chunks(&self, devices: u32) -> Result<u32, LayersError> {
        let stages = self.stages.len();
        match devices > 0 && stages.is_multiple_of(devices as usize) {
            true => Ok((stages / devices as usize) as u32),
            false => Err(LayersError::Uneven { stages, devices }),
        }
    }

    /// Shares out the whole model's work by layers: with `per_device` for a device's average share.
    pub fn work(&self, devices: u32, per_device: StageCost, weights: LayerWeights) -> Vec<StageCost> {
        let weight = |stage: &String| -> f64 {
            let of = |layer| match layer {
                'E' => weights.embedding,
                'm' => weights.prediction,
                'L' => weights.loss,
                _ => weights.transformer,
            };
            stage.chars().map(of).sum()
        };
        let all: f64 = self.stages.iter().map(weight).sum();
        let share = |stage: &String| match all > 0.0 {
            true => weight(stage) / all * f64::from(devices),
            false => 0.0,
        };
        let cost = |s: f64| StageCost::new(per_device.f * s, per_device.b * s, per_device.w * s);
        self.stages.iter().map(|stage| cost(share(stage))).collect()
    }
}

impl FromStr for Layers {
    type Err = LayersError;

    fn from_str(text: &str) -> Result<Self, LayersError> {
        let characters: Vec<(usize, char)> =
            text.chars().enumerate().filter(|(_, c)| *c != ',' && !c.is_whitespace()).collect();
        let mut reader = Reader { characters: &characters, next: 0 };
        let letters = reader.sequence(None)?;
        let stages: Vec<String> = letters.split('|').map(str::to_string).collect();
        if stages.len() > MAX_STAGES {
            return Err(LayersError::TooLong { limit: MAX_STAGES });
        }
        let layers: String = stages.concat();
        for (letter, what) in [('E', "embedding"), ('t', "transformer layer"), ('L', "loss")] {
            if !layers.contains(letter) {
                return Err(LayersError::Missing { what });
            }
        }
        let once = |letter| layers.matches(letter).count() == 1;
        if !once('E') || !layers.starts_with('E') {
            return Err(LayersError::Misplaced { what: "embedding", place: "first" });
        }
        if !once('L') || !layers.ends_with('L') {
            return Err(LayersError::Misplaced { what: "loss", place: "last" });
        }
        Ok(Self { stages })
    }
}

/// Unrolls what is repeated.
struct Reader<'a> {
    characters: &'a [(usize, char)],
    next: usize,
}

impl Reader<'_> {
    /// Up to the end, or up to the bracket that closes the one at `open`.
    fn sequence(&mut self, open: Option<usize>) -> Result<String, LayersError> {
        let mut letters = String::new();
        while let Some(&(at, c)) = self.characters.get(self.next) {
            self.next += 1;
            let mut unit = match c {
                'E' | 't' | 'm' | 'L' | '|' => c.to_string(),
                '(' if open.is_none() => {
                    let inner = self.sequence(Some(at))?;
                    if self.characters.get(self.next).is_none_or(|(_, c)| *c != '*') {
                        return Err(LayersError::Bracket { at: at + 1 });
                    }
                    inner
                }
                ')' if open.is_some() => return Ok(letters),
                '(' | ')' => return Err(LayersError::Bracket { at: at + 1 }),
                '*' => return Err(LayersError::Repeat { at: at + 1 }),
                what => return Err(LayersError::NoLayer { what, at: at + 1 }),
            };
            if let Some(times) = self.times()? {
                if unit.len().saturating_mul(times) > MAX_LAYERS {
                    return Err(LayersError::TooLong { limit: MAX_LAYERS });
                }
                unit = unit.repeat(times);
            }
            letters += &unit;
            if letters.len() > MAX_LAYERS {
                return Err(LayersError::TooLong { limit: MAX_LAYERS });
            }
        }
        match open {
            None => Ok(letters),
            Some(at) => Err(LayersError::Bracket { at: at + 1 }),
        }
    }

    /// `*3`, if that is next.
    fn times(&mut self) -> Result<Option<usize>, LayersError> {
        let Some(&(at, '*')) = self.characters.get(self.next) else { return Ok(None) };
        let digits: String = self.characters[self.next + 1..]
            .iter()
            .map(|(_, c)| *c)
            .take_while(char::is_ascii_digit)
            .collect();
        self.next += 1 + digits.len();
        match digits.parse() {
            Ok(times) => Ok(Some(times)),
            Err(_) if digits.is_empty() => Err(LayersError::Repeat { at: at + 1 }),
            Err(_) => Err(LayersError::TooLong { limit: MAX_LAYERS }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stages(text: &str) -> Vec<String> {
        text.parse::<Layers>().unwrap_or_else(|e| panic!("{text}: {e}")).stages
    }

    #[test]
    fn layouts_unroll() {
        assert_eq!(stages("E,t*2|t*2|t*2,L"), ["Ett", "tt", "ttL"]);
        assert_eq!(stages("Et|(t|)*3tL"), ["Et", "t", "t", "t", "tL"]);
        assert_eq!(stages("E||t|L"), ["E", "", "t", "L"]);
        assert_eq!(stages("E(t|tt)*2,L"), ["Et", "ttt", "ttL"]);
        let deepseek = stages("Et*3|(tt|)*29,m|L");
        assert_eq!((deepseek.len(), &*deepseek[29], &*deepseek[30], &*deepseek[31]), (32, "tt", "m", "L"));
    }

    #[test]
    fn work_is_shared_out_by_layers() {
        let layers: Layers = "Et|t*2|t*2|tL".parse().unwrap();
        assert_eq!(layers.chunks(2), Ok(2));
        let work = layers.work(2, StageCost::new(3.0, 3.0, 3.0), LayerWeights::default());
        assert_eq!(work.iter().map(|c| c.f).collect::<Vec<_>>(), [1.0, 2.0, 2.0, 1.0]);
        assert!(layers.chunks(3).is_err() && layers.chunks(0).is_err());
    }

    #[test]
    fn bad_layouts_are_refused() {
        let error = |text: &str| text.parse::<Layers>().unwrap_err();
        assert_eq!(error("Etx|L"), LayersError::NoLayer { what: 'x', at: 3 });
        assert_eq!(error("E(t|L"), LayersError::Bracket { at: 2 });
        assert_eq!(error("E(t)L"), LayersError::Bracket { at: 2 });
        assert_eq!(error("Et)L"), LayersError::Bracket { at: 3 });
        assert_eq!(error("Et*|L"), LayersError::Repeat { at: 3 });
        assert_eq!(error("*3"), LayersError::Repeat { at: 1 });
        assert_eq!(error("Et*99999999999999999999L"), LayersError::TooLong { limit: MAX_LAYERS });
        assert_eq!(error("E(t*1000000|)*1000000L"), LayersError::TooLong { limit: MAX_LAYERS });
        assert_eq!(error("t|L"), LayersError::Missing { what: "embedding" });
        assert_eq!(error("tE|L"), LayersError::Misplaced { what: "embedding", place: "first" });
        assert_eq!(error("Et|LL"), LayersError::Misplaced { what: "loss", place: "last" });
        assert_eq!(error(""), LayersError::Missing { what: "embedding" });
    }
}
