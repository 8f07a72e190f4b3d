//! A bounded run of the fuzz target on stable.

use crossmesh_comm::lab::fuzz;
use crossmesh_comm::wire::{Header, Kind};
use crossmesh_testkit::seed::Seed;

fn bytes(seed: &mut Seed, len: usize) -> Vec<u8> {
    (0..len).map(|_| seed.below(256) as u8).collect()
}

/// Frames that would be fine, with some of their bytes changed.
fn spoilt(seed: &mut Seed) -> Vec<u8> {
    let mut out = vec![0];
    out.extend_from_slice(&Header::bare(Kind::Hello, 0, 1).encode());
    for kind in [Kind::Data, Kind::Ready, Kind::Beat, Kind::Abort, Kind::Data] {
        let payload = vec![7; 4 * seed.below(200)];
        out.extend_from_slice(&Header::of(kind, 0, seed.below(4) as u32, 0, &payload).encode());
        out.extend_from_slice(&payload);
    }
    for _ in 0..seed.below(3) {
        let at = 1 + seed.below(out.len() - 1);
        out[at] ^= 1 << seed.below(8);
    }
    out.truncate(1 + seed.below(out.len()));
    out
}

#[test]
fn garbage_never_panics() {
    let mut seed = Seed(0x9E37_79B9_7F4A_7C15);
    for iteration in 0..20_000 {
        let len = seed.below(400);
        let mut data = match iteration % 3 {
            0 => spoilt(&mut seed),
            _ => bytes(&mut seed, len),
        };
        if let Some(first) = data.first_mut()
            && iteration % 3 > 0
        {
            *first = iteration as u8 % 3;
        }
        let shown = format!("{data:?}");
        if let Err(cause) = std::panic::catch_unwind(|| fuzz::frames(&data)) {
            eprintln!("iteration {iteration}: {shown}");
            std::panic::resume_unwind(cause);
        }
    }
}
