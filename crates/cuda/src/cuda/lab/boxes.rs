//! Copies of boxes on a card, against the host's way, byte by byte: sides of any shape, vectors of every width, parts that begin anywhere.

use super::{Checked, Lab, Random};
use crate::boxes::Means;
use crate::driver::{Driver, Way};
use crate::{BoxCopy, Combine, CudaError, Side};

/// A side in a memory that starts at 0, and how long that has to be.
fn side(random: &mut Random, bytes: u64, grain: u64) -> Side {
    let run = (1 + random.below(40)) * grain;
    let (mut stride, mut outer) = (run, vec![]);
    for _ in 0..random.below(4) {
        let count = 1 + random.below(5);
        stride += random.below(4) * grain;
        outer.push((count, stride));
        stride *= count;
    }
    let start = random.below(50) * grain;
    let held = run * outer.iter().map(|(count, _)| count).product::<u64>();
    outer.push(((start + bytes).div_ceil(held), stride));
    outer.reverse();
    Side { base: random.below(64) * grain, run, outer, start }
}

fn sum_f32(into: &mut [u8], from: &[u8]) {
    for (into, from) in into.as_chunks_mut::<4>().0.iter_mut().zip(from.as_chunks::<4>().0) {
        *into = (f32::from_le_bytes(*into) + f32::from_le_bytes(*from)).to_le_bytes();
    }
}

/// So many random copies.
#[expect(unsafe_code, reason = "buffers of this function's own")]
pub fn all(lab: &mut Lab<'_>, copies: usize) -> Result<Vec<Checked>, CudaError> {
    let mut checked: Vec<Checked> = vec![];
    for i in 0..copies {
        let grain = [1, 2, 4, 8, 16, 64][i % 6];
        let bytes = (1 + lab.random.below(3000)) * grain;
        let (from, into) = (side(&mut lab.random, bytes, grain), side(&mut lab.random, bytes, grain));
        let combine = (grain >= 4 && i % 4 == 1).then_some(Combine {
            dtype: "f32",
            op: "sum",
            element_bytes: 4,
            host: sum_f32,
        });
        // Numbers, so that their sums are.
        let random = |random: &mut Random, bytes: u64| -> Vec<u8> {
            (0..bytes.div_ceil(4)).flat_map(|_| random.number().to_le_bytes()).collect()
        };
        let source = random(&mut lab.random, from.extent().end);
        let mut target = random(&mut lab.random, into.extent().end);
        let (there, here) = (lab.bytes(source.len() as u64)?, lab.bytes(target.len() as u64)?);
        there.write(&source)?;
        here.write(&target)?;
        let shifted = |side: &Side, by: u64| Side { base: side.base + by, ..side.clone() };
        let copy =
            |a: u64, b: u64| BoxCopy { from: shifted(&from, a), into: shifted(&into, b), bytes, combine };
        let on_card = copy(there.at(), here.at());
        // SAFETY: memory of the card, which stays until it is waited for.
        let event = unsafe { lab.cuda.copy(Way::Local, &on_card)? };
        lab.cuda.wait(event)?;
        lab.cuda.forget(event);
        // SAFETY: two vectors of ours.
        unsafe { copy(source.as_ptr() as u64, target.as_mut_ptr() as u64).run_on_host() };
        let by = match on_card.means() {
            Means::Kernel { name, .. } => name,
            Means::Plain { .. } => "one run".into(),
            Means::Nothing => "nothing".into(),
        };
        let wrong = here.read()?.iter().zip(&target).filter(|(a, b)| a != b).count();
        let what = format!("box by {by}");
        match checked.iter_mut().find(|checked| checked.what == what) {
            Some(checked) => checked.error += wrong as f64,
            None => checked.push(Checked { what, error: wrong as f64, allowed: 0.0, same_bits: true }),
        }
    }
    Ok(checked)
}
