//! Composes: kernels, layers, models and optimizers behind one seam, the stage.

pub mod kernels;
