//! The built-in models: lists of units that [`crate::chain`] cuts into stages.

pub(crate) mod branch;
pub mod gpt;
pub mod unet;

/// A model that cannot be built.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum ConfigError {
    #[error("{key} = {value}: {reason}\nhint: {hint}")]
    Value { key: &'static str, value: String, reason: String, hint: String },
}

impl ConfigError {
    pub fn new(key: &'static str, value: impl ToString, reason: impl ToString, hint: impl ToString) -> Self {
        let (value, reason, hint) = (value.to_string(), reason.to_string(), hint.to_string());
        Self::Value { key, value, reason, hint }
    }
}

/// More elements than this in a tensor, or numbers in a model, are taken for a typing mistake; and every product of sizes that is smaller fits.
const MOST: u64 = 1 << 53;
/// More units than this are, too.
pub const MOST_LAYERS: usize = 1 << 14;

/// Refuses sizes whose product nobody could hold: `key` is the one to look at first.
fn product(key: &'static str, value: usize, factors: &[usize]) -> Result<u64, ConfigError> {
    let product = factors.iter().try_fold(1u64, |product, &n| product.checked_mul(n as u64));
    product.filter(|n| *n <= MOST).ok_or_else(|| {
        let factors: Vec<String> = factors.iter().map(usize::to_string).collect();
        let reason = format!("a tensor of {} numbers fits no machine", factors.join(" × "));
        ConfigError::new(key, value, reason, "use a smaller one")
    })
}

/// Refuses more units than anybody has.
fn few(key: &'static str, value: usize) -> Result<(), ConfigError> {
    match value <= MOST_LAYERS {
        true => Ok(()),
        false => {
            let reason = "deeper than any model there is";
            Err(ConfigError::new(key, value, reason, format!("use {MOST_LAYERS} at most")))
        }
    }
}

/// Refuses zero.
fn positive(fields: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    match fields.iter().find(|(_, value)| *value == 0) {
        Some((key, value)) => {
            Err(ConfigError::new(key, value, "there is nothing to compute", "use 1 or more"))
        }
        None => Ok(()),
    }
}
