//! The ops that models are made of, each with the call of [`super::Builder`] that adds it.

pub mod attention;
pub mod conv;
pub mod embed;
pub mod image;
pub mod linear;
pub mod loss;
pub mod norm;
pub mod pointwise;
pub mod reshard;
pub mod rotary;
