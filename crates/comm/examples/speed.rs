//! How fast two ranks of one machine are: `cargo run --release -p crossmesh-comm --example speed -- tcp 256`.
//!
//! Threads as ranks over the transport named first (mem, tcp, shm; sign or encrypt: tcp with
//! its frames protected), a tensor of as many MiB as named second; the
//! third argument splits it into that many tensors.
#![allow(clippy::print_stdout)]

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Kind, options, planned, run_with};
use crossmesh_comm::lab::execute::ExecuteOptions;
use crossmesh_core::reshard::Strategy;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let kind = match args.first().map(String::as_str) {
        Some("mem") => Kind::Mem,
        Some("shm") => Kind::Shm,
        Some("sign") => Kind::Signed,
        Some("encrypt") => Kind::Encrypted,
        _ => Kind::Tcp,
    };
    let mib: u64 = args.get(1).and_then(|a| a.parse().ok()).unwrap_or(256);
    let tensors: u64 = args.get(2).and_then(|a| a.parse().ok()).unwrap_or(1);
    let elements = (mib << 20) / 4 / tensors;
    let (src, dst) = (format!("f32[{elements}]@A{{x:1}}(_)"), format!("f32[{elements}]@B{{x:1}}(_)"));
    let plan = planned(&vec![(src.as_str(), dst.as_str()); tensors as usize], Strategy::SendRecv, None);
    let reports = run_with(&plan, kind, &ExecuteOptions { repeat: 7, check: true, ..options(kind) });
    let mut seconds = reports[1].seconds.clone();
    seconds.sort_by(f64::total_cmp);
    let median = seconds[seconds.len() / 2];
    println!(
        "{kind:?} {mib} MiB in {tensors} tensors: median {:.2} ms, {:.2} GB/s",
        median * 1e3,
        (mib << 20) as f64 / median / 1e9
    );
}
