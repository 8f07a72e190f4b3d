//! Suite `paper`: the end-to-end experiment of AlpaComm (MLSys'23), from its published settings.
//!
//! Pass times are FLOPs over a stated rate, and with recomputation on B takes twice as long as F. Where two stages share
//! a host, only the edges between hosts cross the network.

use super::models::{Gpt, UTransformer};
use super::{Case, Suite};

/// What a V100 reaches on a GPT in f16, and on a U-Transformer in f32.
const GPT_FLOPS_PER_S: f64 = 50e12;
const U_FLOPS_PER_S: f64 = 8e12;
const NIC: &str = "10Gbit";

pub fn suite() -> Suite {
    Suite {
        schema: super::SCHEMA.into(),
        name: "paper".into(),
        about: "AlpaComm's end-to-end experiment: hosts with one 10 Gbit/s NIC, devices of 50 TFLOP/s (GPT, f16) and 8 TFLOP/s (U-Transformer, f32), recomputation on".into(),
        cases: vec![
            gpt("GPT-3 2.6B (2,2,2)", "2.6", 64, [2, 2, 2], vec![4, 4]),
            gpt("GPT-3 2.6B (2,1,4)", "2.6", 128, [2, 1, 4], vec![4, 4]),
            gpt("GPT 1.3B (1,2,2)", "1.3", 4, [1, 2, 2], vec![2, 2]),
            u_transformer("U-Transformer 1B", 480.0, 2, 8),
            u_transformer("U-Transformer 2B", 672.0, 4, 9),
        ],
    }
}

fn gpt(name: &str, size: &str, microbatches: u32, [dp, op, pp]: [u32; 3], hosts: Vec<u32>) -> Case {
    let (hidden, layers, batch) = if size == "2.6" { (2560.0, 32.0, 1024.0) } else { (2048.0, 24.0, 64.0) };
    let model = Gpt {
        hidden,
        layers,
        sequence: 1024.0,
        vocabulary: 51200.0,
        batch: batch / f64::from(microbatches),
        dp,
        op,
        pp,
        flops_per_s: GPT_FLOPS_PER_S,
    };
    Case {
        name: name.into(),
        about: format!(
            "(dp,op,pp) = ({dp},{op},{pp}), batch {batch} in {microbatches} microbatches of 1024 tokens each"
        ),
        microbatches,
        nic: NIC.into(),
        hosts,
        stages: model.stages(),
        crossings: model.crossings(),
        paper: "+10 %".into(),
    }
}

fn u_transformer(name: &str, channels: f64, devices: u32, first_layers: usize) -> Case {
    let microbatches = 32;
    let batch = 2048.0 / f64::from(microbatches);
    let model = UTransformer { channels, batch, devices, first_layers, flops_per_s: U_FLOPS_PER_S };
    Case {
        name: name.into(),
        about: format!(
            "{channels} channels, batch 2048 in {microbatches} microbatches, layers 0-{} | {first_layers}-12 on {devices} + {devices} devices",
            first_layers - 1
        ),
        microbatches,
        nic: NIC.into(),
        hosts: vec![devices; 2],
        stages: model.stages(),
        crossings: model.crossings(),
        paper: "+50 %".into(),
    }
}
