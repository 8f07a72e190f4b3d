//! ZB-H1 and ZB-H2 (Zero Bubble Pipeline Parallelism): backwards are split, and W lags behind B.
//!
//! At stage i, H1 has 1F1B's window p - i and a lag of i; H2 has eager's window 2(p - i) - 1 and a lag of 2i. Late stages
//! have little in flight and put off many W, so that each stage holds p activations (2p - 1 of H2) from F to W.
//!
//! ```text
//! p = 4, stage 2 of H1   F0 F1 B0 F2 B1 F3 B2 W0 F4 B3 W1 F5 ...      window 2, lag 2
//! ```

use crate::id::{MicrobatchId, StageId};

use super::{GenerateError, Name, Pass, Placement, Schedule, Spec, named};
use crate::schedule::PassKind;

pub fn h1(spec: &Spec, placement: Placement) -> Result<Schedule, GenerateError> {
    let orders = (0..spec.devices).map(|i| lagging(i, spec.devices - i, i, spec.microbatches)).collect();
    named(Name::ZbH1, spec, placement, orders)
}

pub fn h2(spec: &Spec, placement: Placement) -> Result<Schedule, GenerateError> {
    let order = |i| lagging(i, 2 * (spec.devices - i) - 1, 2 * i, spec.microbatches);
    named(Name::ZbH2, spec, placement, (0..spec.devices).map(order).collect())
}

fn lagging(stage: u32, window: u32, lag: u32, microbatches: u32) -> Vec<Pass> {
    let pass = |kind, m| Pass::new(kind, StageId(stage), MicrobatchId(m));
    let mut order: Vec<Pass> = (0..window.min(microbatches)).map(|m| pass(PassKind::F, m)).collect();
    let mut weighed = 0;
    for m in 0..microbatches {
        order.push(pass(PassKind::B, m));
        if m >= lag {
            order.push(pass(PassKind::W, weighed));
            weighed += 1;
        }
        if m + window < microbatches {
            order.push(pass(PassKind::F, m + window));
        }
    }
    order.extend((weighed..microbatches).map(|m| pass(PassKind::W, m)));
    order
}
