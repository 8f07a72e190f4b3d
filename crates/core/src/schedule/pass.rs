//! A pass: one piece of work of one stage on one microbatch, written `2F0`.
//!
//! ```
//! use crossmesh_core::schedule::{Pass, PassKind};
//! let pass: Pass = "2F0".parse().unwrap();
//! assert_eq!((pass.kind, pass.stage.0, pass.microbatch.0), (PassKind::F, 2, 0));
//! assert_eq!("11BW3".parse::<Pass>().unwrap().to_string(), "11BW3");
//! ```

use std::fmt;
use std::str::FromStr;

use crate::id::{MicrobatchId, StageId};

/// What a pass does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PassKind {
    /// Forward.
    F,
    /// Backward for the stage's input: what the stage before waits for.
    B,
    /// Backward for the weights: nobody waits for it but the optimizer.
    W,
    /// Both backwards in one.
    BW,
    /// Vocabulary: the local part of the output layer and its softmax.
    S,
    /// Vocabulary: gradients of the output layer, once the softmax is known.
    T,
    /// An activation leaves for the device that keeps it meanwhile (BPipe).
    Evict,
    /// An activation leaves for the host's memory.
    Offload,
    /// An evicted or offloaded activation comes back.
    Load,
    /// The stage's weights are updated. It belongs to the step: its microbatch is 0.
    Optimizer,
}

impl PassKind {
    pub const ALL: [PassKind; 10] = [
        PassKind::F,
        PassKind::B,
        PassKind::W,
        PassKind::BW,
        PassKind::S,
        PassKind::T,
        PassKind::Evict,
        PassKind::Offload,
        PassKind::Load,
        PassKind::Optimizer,
    ];

    /// Its letters within a pass, such as the `BW` of `2BW0`.
    pub fn letters(self) -> &'static str {
        match self {
            PassKind::F => "F",
            PassKind::B => "B",
            PassKind::W => "W",
            PassKind::BW => "BW",
            PassKind::S => "S",
            PassKind::T => "T",
            PassKind::Evict => "EVICT",
            PassKind::Offload => "OFFLOAD",
            PassKind::Load => "LOAD",
            PassKind::Optimizer => "OPT",
        }
    }

    /// Whether it makes the gradient that the stage before waits for.
    pub fn is_backward(self) -> bool {
        matches!(self, PassKind::B | PassKind::BW)
    }

    /// Whether it makes the gradient of the weights, and so ends the life of an activation.
    pub fn frees_activation(self) -> bool {
        matches!(self, PassKind::W | PassKind::BW)
    }

    /// Whether it only moves an activation. Moves are issued in their turn and run beside the compute passes.
    pub fn is_move(self) -> bool {
        matches!(self, PassKind::Evict | PassKind::Offload | PassKind::Load)
    }
}

impl fmt::Display for PassKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.letters())
    }
}

impl FromStr for PassKind {
    type Err = PassError;

    fn from_str(s: &str) -> Result<Self, PassError> {
        let found = PassKind::ALL.into_iter().find(|kind| kind.letters() == s);
        found.ok_or_else(|| PassError::Kind(s.into()))
    }
}

/// One pass of one stage on one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pass {
    pub kind: PassKind,
    /// The virtual stage, in model order.
    pub stage: StageId,
    pub microbatch: MicrobatchId,
}

impl Pass {
    pub fn new(kind: PassKind, stage: StageId, microbatch: MicrobatchId) -> Self {
        Self { kind, stage, microbatch }
    }

    /// The same stage and microbatch, another kind.
    pub fn with_kind(self, kind: PassKind) -> Self {
        Self { kind, ..self }
    }

    /// The same kind and microbatch, another stage.
    pub fn at_stage(self, stage: StageId) -> Self {
        Self { stage, ..self }
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}{}", self.stage.0, self.kind, self.microbatch.0)
    }
}

impl FromStr for Pass {
    type Err = PassError;

    fn from_str(s: &str) -> Result<Self, PassError> {
        let letters = s.find(|c: char| !c.is_ascii_digit()).unwrap_or(s.len());
        let digits = s.rfind(|c: char| !c.is_ascii_digit()).map_or(s.len(), |last| {
            // The last letter may take more than a byte.
            last + s[last..].chars().next().map_or(0, char::len_utf8)
        });
        let (stage, microbatch) = (&s[..letters], &s[digits..]);
        if letters == digits || stage.is_empty() || microbatch.is_empty() {
            return Err(PassError::Form(s.into()));
        }
        let kind = s[letters..digits].parse()?;
        let number = |digits: &str| digits.parse().map_err(|_| PassError::Number(s.into()));
        Ok(Self { kind, stage: StageId(number(stage)?), microbatch: MicrobatchId(number(microbatch)?) })
    }
}

/// Why a text is no pass.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PassError {
    #[error("`{0}` is no pass\nhint: a pass is stage, kind and microbatch, such as 2F0")]
    Form(String),
    #[error("unknown kind of pass `{0}`\nhint: kinds are F, B, W, BW, S, T, EVICT, OFFLOAD, LOAD and OPT")]
    Kind(String),
    #[error("a number in `{0}` is too large")]
    Number(String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn display_and_from_str_undo_each_other(kind in 0..10usize, stage: u32, microbatch: u32) {
            let pass = Pass::new(PassKind::ALL[kind], StageId(stage), MicrobatchId(microbatch));
            prop_assert_eq!(pass.to_string().parse::<Pass>().unwrap(), pass);
        }

        #[test]
        fn any_text_is_a_pass_or_an_error(text in "\\PC{0,12}") {
            if let Ok(pass) = text.parse::<Pass>() {
                prop_assert_eq!(pass.to_string().parse::<Pass>().unwrap(), pass);
            }
        }
    }

    #[test]
    fn what_is_no_pass_is_refused() {
        let error = |s: &str| s.parse::<Pass>().unwrap_err();
        for text in ["", "F0", "2F", "20", "F", "é", "2é"] {
            assert_eq!(error(text), PassError::Form(text.into()));
        }
        assert_eq!(error("2X0"), PassError::Kind("X".into()));
        assert_eq!(error("2F 0"), PassError::Kind("F ".into()));
        assert_eq!(error("99999999999F0"), PassError::Number("99999999999F0".into()));
    }
}
