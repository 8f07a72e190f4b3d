//! Composes: kernels, layers, models and optimizers behind one seam, the stage.
//!
//! ```text
//! kernels     what a device can do: one trait, buffers nobody looks into
//! layers      forward, B and W as separate calls; tensor parallelism inside
//! chain       units of a model in a row are a stage
//! models      GPT, the U-Transformer
//! stage       THE SEAM: passes over buffers with names and layouts, parameters, bytes
//! optim       AdamW, SGD, clipping, schedules, on flat shards
//! checkpoint  what a training run has learnt, on disk: every element once, loaded on any layout
//! ```
//!
//! What runs above the seam (schedules, reshard plans, the engine) knows no model; what is below knows no network.

pub mod chain;
pub mod checkpoint;
pub mod group;
pub mod kernels;
pub mod layers;
pub mod models;
pub mod optim;
pub mod parameter;
pub mod place;
pub mod stage;
