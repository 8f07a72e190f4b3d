//! Interleaved 1F1B (Megatron-LM): several chunks a device, round robin.
//!
//! Microbatches go in groups of p. A device forwards a group through its chunk 0, then through chunk 1, and so on; its
//! backwards take the chunks the other way round. algorithms.md B1.

use crate::id::{DeviceId, MicrobatchId};

use super::{Backward, GenerateError, Name, Pass, Placement, Schedule, Spec, named};
use crate::schedule::PassKind;

pub fn interleaved(spec: &Spec, placement: Placement, backward: Backward) -> Result<Schedule, GenerateError> {
    let (devices, microbatches) = (spec.devices, spec.microbatches);
    let chunks = placement.num_chunks() as u32;
    if chunks > 1 && !microbatches.is_multiple_of(devices) {
        return Err(GenerateError::NotAMultiple { name: Name::Interleaved1F1B, microbatches, devices });
    }
    // Of one chunk it is 1F1B, whose groups are single microbatches.
    let group = if chunks > 1 { devices } else { 1 };
    let table = table(group, chunks, microbatches);
    let orders =
        placement.devices().map(|device| order(&placement, device, &table, group, backward)).collect();
    named(Name::Interleaved1F1B, spec, placement, orders)
}

/// The microbatch and chunk of the k-th forward of every device.
fn table(group: u32, chunks: u32, microbatches: u32) -> Vec<(u32, u32)> {
    let groups = (0..microbatches).step_by(group as usize);
    groups
        .flat_map(|first| {
            let members = first..(first + group).min(microbatches);
            (0..chunks).flat_map(move |chunk| members.clone().map(move |m| (m, chunk)))
        })
        .collect()
}

fn order(
    placement: &Placement,
    device: DeviceId,
    table: &[(u32, u32)],
    group: u32,
    backward: Backward,
) -> Vec<Pass> {
    let stages = placement.stages_on(device);
    let chunks = stages.len();
    let behind = placement.num_devices() - 1 - device.index();
    let warm = match chunks {
        1 => behind,
        _ => 2 * behind + (chunks - 1) * group as usize,
    };
    let warm = warm.min(table.len());
    let pass = |kind, chunk: usize, m| Pass::new(kind, stages[chunk], MicrobatchId(m));
    let forward = |k: usize| pass(PassKind::F, table[k].1 as usize, table[k].0);
    let push_backward = |order: &mut Vec<Pass>, k: usize| {
        let (m, chunk) = (table[k].0, chunks - 1 - table[k].1 as usize);
        match backward {
            Backward::Fused => order.push(pass(PassKind::BW, chunk, m)),
            Backward::Split => order.extend([pass(PassKind::B, chunk, m), pass(PassKind::W, chunk, m)]),
        }
    };
    let mut order: Vec<Pass> = (0..warm).map(forward).collect();
    for k in 0..table.len() {
        if warm + k < table.len() {
            order.push(forward(warm + k));
        }
        push_backward(&mut order, k);
    }
    order
}
