//! Programs whose buffers are in memory of a device, over a stand-in of its driver: the code that runs on a GPU, but for the driver's own calls.
//! Every element is looked at, and no rule of the driver may be broken: no memory freed under a copy, none left behind, no event lost.

mod common;

use std::sync::Arc;

use common::{KINDS, Kind, options, run_each};
use crossmesh_comm::lab::execute::ExecuteOptions;
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::{Plan, PlanError, PlanOptions, Problem, Strategy, plan};
use crossmesh_cuda::Gpu;
use crossmesh_cuda::standin::{Call, Record, StandIn};
use crossmesh_testkit::arb::{Limits, arb_reshard};
use proptest::prelude::*;

/// Which ranks have their memory on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Where {
    Everywhere,
    EvenRanks,
    OddRanks,
}

impl Where {
    fn is_on_device(self, rank: Rank) -> bool {
        match self {
            Where::Everywhere => true,
            Where::EvenRanks => rank.0.is_multiple_of(2),
            Where::OddRanks => !rank.0.is_multiple_of(2),
        }
    }
}

/// Runs a plan; every rank on the device opens it for itself, as processes do, or all share it, as threads do.
fn run(plan: &Plan, kind: Kind, place: Where, apart: bool) -> Result<Vec<Vec<Call>>, String> {
    let mut records: Vec<Record> = vec![];
    let mut open = || {
        let (driver, record) = StandIn::new(1 << 30);
        records.push(record);
        Gpu::new(Box::new(driver))
    };
    let shared = open();
    let gpus: Vec<Arc<Gpu>> = (0..64).map(|_| if apart { open() } else { shared.clone() }).collect();
    drop(shared);
    let options = |rank: Rank| ExecuteOptions {
        gpu: place.is_on_device(rank).then(|| gpus[rank.index()].clone()),
        ..options(kind)
    };
    let reports = run_each(plan, kind, options);
    drop(gpus);
    for (rank, report) in reports {
        let report = report.map_err(|e| format!("{rank}: {e}"))?;
        if !report.verified {
            return Err(format!("{rank}: {:?}", report.wrong));
        }
    }
    match records.iter().flat_map(Record::broken).next() {
        Some(broken) => Err(broken),
        None => Ok(records.iter().map(Record::calls).collect()),
    }
}

#[expect(clippy::disallowed_methods, reason = "how many cases, not what any of them is")]
fn sweep() -> u32 {
    std::env::var("CROSSMESH_SWEEP").ok().and_then(|n| n.parse().ok()).unwrap_or(24)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: sweep(), failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_element_arrives(
        (src, dst) in arb_reshard(Limits::small()),
        kind in prop::sample::select(KINDS.to_vec()),
        place in prop::sample::select(vec![Where::Everywhere, Where::EvenRanks, Where::OddRanks]),
        apart in any::<bool>(),
    ) {
        let problem = Problem::pair(src, dst).unwrap();
        for strategy in [Strategy::Flow, Strategy::SendRecv] {
            let options = PlanOptions { strategy, chunk_bytes: Some(1024), ..Default::default() };
            let plan = match plan(&problem, &options) {
                Err(PlanError::CannotReduce { .. }) => continue,
                other => other.unwrap(),
            };
            let ran = run(&plan, kind, place, apart);
            prop_assert!(ran.is_ok(), "{} {:?} {:?}: {}", strategy, kind, place, ran.unwrap_err());
        }
    }
}

fn copies(calls: &[Vec<Call>], way: crossmesh_cuda::driver::Way) -> u64 {
    let of = |call: &Call| match call {
        Call::Copy { way: other, bytes, .. } if *other == way => *bytes,
        _ => 0,
    };
    calls.iter().flatten().map(of).sum()
}

/// 6 MiB: parts are cut, several are under way at a time.
const BIG: (&str, &str) = ("f32[1536,1024]@A{tp:2}(tp,_)", "f32[1536,1024]@B{tp:3}(_,tp)");

#[test]
fn peers_on_one_device_map_each_others_memory() {
    use crossmesh_cuda::driver::Way;
    let plan = common::planned(&[BIG], Strategy::Flow, None);
    let calls = run(&plan, Kind::Shm, Where::Everywhere, true).unwrap();
    let imports = calls.iter().flatten().filter(|call| matches!(call, Call::Import { .. })).count();
    assert_eq!(imports, 6, "each of three receivers maps both senders");
    assert_eq!(copies(&calls, Way::Local), 6 << 20, "all of it is copied on the device, once");
    // Sources are filled from the host, destinations poisoned; then looked at. Nothing else is staged.
    assert_eq!(copies(&calls, Way::In), 12 << 20);
    assert_eq!(copies(&calls, Way::Out), 6 << 20);
}

#[test]
fn what_leaves_the_host_is_staged_once() {
    use crossmesh_cuda::driver::Way;
    for kind in [Kind::Tcp, Kind::Encrypted] {
        let plan = common::planned(&[BIG], Strategy::Flow, None);
        let calls = run(&plan, kind, Where::Everywhere, true).unwrap();
        assert_eq!(copies(&calls, Way::Local), 0);
        assert_eq!(copies(&calls, Way::In), 18 << 20, "filled, poisoned, received");
        assert_eq!(copies(&calls, Way::Out), 12 << 20, "sent, looked at");
        let pins = calls.iter().flatten().filter(|call| matches!(call, Call::Pin { .. })).count();
        assert!(pins < 200, "{pins} buffers were pinned for 6 MiB");
    }
}

#[test]
fn a_device_that_is_full_is_named() {
    let plan = common::planned(&[BIG], Strategy::Flow, None);
    let (driver, record) = StandIn::new(1 << 20);
    let gpu = Gpu::new(Box::new(driver));
    let small = |_| ExecuteOptions { gpu: Some(gpu.clone()), ..options(Kind::Tcp) };
    // No rank gets past its allocation, so that nobody waits at a barrier.
    let reports = run_each(&plan, Kind::Tcp, small);
    let error = reports[&Rank(0)].as_ref().unwrap_err().to_string();
    assert!(error.contains("allocate its shards"), "{error}");
    assert!(error.contains("of device memory on a stand-in: 1048576 B of 1048576 B are free"), "{error}");
    drop(gpu);
    assert_eq!(record.broken(), Vec::<String>::new());
}
