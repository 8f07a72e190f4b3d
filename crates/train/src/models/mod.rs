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

/// Refuses zero.
fn positive(fields: &[(&'static str, usize)]) -> Result<(), ConfigError> {
    match fields.iter().find(|(_, value)| *value == 0) {
        Some((key, value)) => {
            Err(ConfigError::new(key, value, "there is nothing to compute", "use 1 or more"))
        }
        None => Ok(()),
    }
}
