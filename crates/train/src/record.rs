//! What a step of training came to, as one rank saw it.

/// One step on one rank. Loss, norm and rate are the same on all of them.
#[derive(Debug, Clone, PartialEq)]
pub struct StepRecord {
    /// From 0.
    pub step: u64,
    /// The mean over the step's batch.
    pub loss: f64,
    /// Of all gradients together, before clipping.
    pub grad_norm: f64,
    pub learning_rate: f64,
    /// Whether its loss or norm was not finite: then no weight was changed.
    pub skipped: bool,
    pub times: StepTimes,
    pub bytes_sent: u64,
    pub bytes_received: u64,
    /// The most bytes that all stages of this rank held of their microbatches at once.
    pub activation_bytes: u64,
    /// By stage of this rank: the most microbatches and bytes it held, in all steps so far.
    pub peaks: Vec<Peak>,
    /// When every pass ran, in seconds from the step's start; if it was asked for.
    pub passes: Vec<PassSpan>,
}

/// Where a rank's time went, in seconds. They add up to `step`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct StepTimes {
    pub step: f64,
    /// Passes, without what they waited for inside.
    pub compute: f64,
    /// The device stood still while something it needed was on its way.
    pub exposed: f64,
    /// It stood still for another reason: nobody had made what it needed.
    pub bubble: f64,
    /// Weights were updated.
    pub optimizer: f64,
}

/// The most that a stage held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peak {
    pub stage: u32,
    /// That waited for their B.
    pub microbatches: usize,
    pub bytes: u64,
}

/// A pass, and when it ran.
#[derive(Debug, Clone, PartialEq)]
pub struct PassSpan {
    /// As schedules print it: `0F3`.
    pub pass: String,
    pub start: f64,
    pub end: f64,
    /// For how much of it the device stood still for other ranks.
    pub waited: f64,
}
