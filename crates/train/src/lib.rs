//! Composes: kernels, graphs, models and optimizers behind one seam, the stage.
//!
//! ```text
//! kernels     what a device can do: one trait, buffers nobody looks into
//! graph       layers as graphs of ops: their passes, what is kept and what ranks say to each other follow
//! chain       units of a model in a row are a stage
//! flat, deal  weights as passes see them; and dealt out over the ranks that hold the same
//! models      GPT, the U-Transformer
//! stage       THE SEAM: passes over buffers with names and layouts, parameters, bytes
//! config      from TOML to a job
//! data        samples that have numbers: text, token files, synthetic languages and images
//! optim       AdamW, SGD, clipping, schedules, on flat shards
//! generate    a GPT of a checkpoint, token by token
//! checkpoint  what a training run has learnt, on disk: every element once, loaded on any layout
//! job         which stage runs on which mesh, in which order
//! sums        which gradients are summed over which ranks
//! wiring      a job as a step: a reshard plan on every edge
//! runtime     a rank of a job: the engine moves, a thread computes
//! ```
//!
//! What is above the seam (the last three) knows no model; what is below knows no network.

mod boxes;
pub mod chain;
pub mod checkpoint;
pub mod config;
pub mod data;
pub mod deal;
pub mod flat;
pub mod generate;
pub mod graph;
pub mod group;
pub mod job;
pub mod kernels;
pub mod models;
pub mod optim;
pub mod parameter;
pub mod record;
pub mod runtime;
pub mod stage;
pub mod stage_rank;
pub mod strands;
pub mod sums;
pub mod tier;
pub mod wiring;
