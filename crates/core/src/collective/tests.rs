use super::*;
use crate::cluster::{Cluster, Host};
use crate::dtype::DType;
use crate::reshard::{Plan, lower};
use crate::sim::simulate;
use crate::verify::verify;

fn cluster(hosts: usize, devices: u32) -> Cluster {
    let host = Host { nic_out_bytes_per_s: 1e9, nic_in_bytes_per_s: 1e9, ..Host::with_devices(devices) };
    Cluster::of_hosts(vec![host; hosts])
}

fn group(ranks: u32) -> Group {
    Group::new((0..ranks).map(Rank).collect()).unwrap()
}

/// Predicted seconds of a plan, which has to be right.
fn seconds(plan: &Plan) -> f64 {
    verify(plan).unwrap_or_else(|e| panic!("{} of {}: {e}", plan.strategy, plan.problem.reshards[0].name));
    simulate(&lower(plan), &plan.problem.cluster).unwrap().makespan_s
}

fn planned(call: &Call, cluster: &Cluster, algorithm: Algorithm, fixed_order: bool) -> Plan {
    let options = CollectiveOptions { algorithm, fixed_order, ..Default::default() };
    plan(std::slice::from_ref(call), cluster, &options).unwrap()
}

/// What the links carry, over what they can.
fn busbw(collective: Collective, hosts: usize, algorithm: Algorithm, fixed_order: bool) -> f64 {
    let elements = 60 << 20;
    let call = Call::new(collective, &group(hosts as u32), DType::F32, elements);
    let plan = planned(&call, &cluster(hosts, 1), algorithm, fixed_order);
    4.0 * elements as f64 / seconds(&plan) * collective.bus_factor(hosts) / 1e9
}

#[test]
fn large_collectives_run_at_the_rate_of_the_links() {
    for collective in Collective::ALL.into_iter().filter(|c| *c != Collective::Barrier) {
        for hosts in [2, 3, 5] {
            for algorithm in [Algorithm::Auto, Algorithm::Flow] {
                let busbw = busbw(collective, hosts, algorithm, false);
                assert!((0.97..1.001).contains(&busbw), "{algorithm} {collective} over {hosts}: {busbw}");
            }
        }
    }
}

#[test]
fn every_algorithm_has_its_rate() {
    let at_least = |collective, algorithm, fixed, least: f64| {
        let busbw = busbw(collective, 5, algorithm, fixed);
        assert!(busbw > least && busbw < 1.001, "{algorithm} {collective}, fixed {fixed}: {busbw}");
    };
    for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather] {
        at_least(collective, Algorithm::Ring, false, 0.97);
        at_least(collective, Algorithm::TwoLevel, false, 0.97);
    }
    at_least(Collective::AllReduce, Algorithm::Pairwise, false, 0.97);
    at_least(Collective::ReduceScatter, Algorithm::Direct, false, 0.97);
    at_least(Collective::Broadcast, Algorithm::Ring, false, 0.97);
    at_least(Collective::Reduce, Algorithm::Ring, false, 0.97);
    // In the group's order: straight to the owners loses the time until the parts follow each other, along the line
    // the part that a ring need not send.
    at_least(Collective::AllReduce, Algorithm::Auto, true, 0.85);
    at_least(Collective::ReduceScatter, Algorithm::Auto, true, 0.85);
    at_least(Collective::AllReduce, Algorithm::Ring, true, 0.75);
}

#[test]
fn a_host_sends_what_it_has_once() {
    // Eight ranks on two hosts; each host has a gigabyte a second.
    let call = Call::new(Collective::AllReduce, &group(8), DType::F32, 30 << 20);
    for fixed in [false, true] {
        let s = seconds(&planned(&call, &cluster(2, 4), Algorithm::TwoLevel, fixed));
        let least = 4.0 * f64::from(30 << 20) / 1e9;
        assert!(s < 1.1 * least, "fixed {fixed}: {s} s, at least {least} s");
    }
    let auto = planned(&call, &cluster(2, 4), Algorithm::Auto, false);
    assert!(auto.strategy == "two-level" || auto.strategy == "flow", "{:?}", auto.reasons);
}

#[test]
fn small_messages_take_few_steps() {
    let mut cluster = cluster(8, 1);
    cluster.latency_s = 50e-6;
    let chosen = |elements| {
        let call = Call::new(Collective::AllReduce, &group(8), DType::F32, elements);
        let plan = planned(&call, &cluster, Algorithm::Auto, false);
        (plan.strategy.clone(), seconds(&plan))
    };
    let (strategy, s) = chosen(1);
    assert_eq!(strategy, "direct");
    assert!(s < 60e-6, "{s} s");
    // One step more for an eighth of the bytes.
    assert_eq!(chosen(1 << 16).0, "pairwise");
}

#[test]
fn several_groups_act_at_once() {
    // Two groups across two hosts share the NICs, so each takes twice as long as alone.
    let groups = [vec![Rank(0), Rank(2)], vec![Rank(3), Rank(1)]].map(|ranks| Group::new(ranks).unwrap());
    let calls = groups.map(|group| Call::new(Collective::AllReduce, &group, DType::F32, 10 << 20));
    for algorithm in [Algorithm::Ring, Algorithm::Flow, Algorithm::Auto] {
        let options = CollectiveOptions { algorithm, ..Default::default() };
        let both = seconds(&plan(&calls, &cluster(2, 2), &options).unwrap());
        let one = seconds(&plan(&calls[..1], &cluster(2, 2), &options).unwrap());
        assert!((1.9..2.1).contains(&(both / one)), "{algorithm}: {both} s, alone {one} s");
    }
}

#[test]
fn any_subset_of_ranks_is_a_group() {
    let group = Group::new(vec![Rank(6), Rank(1), Rank(3)]).unwrap();
    let call = Call::new(Collective::Broadcast, &group, DType::Bf16, 9).with_root(Rank(1));
    let (src, dst) = call.layouts().unwrap().remove(0);
    assert_eq!(
        (src.to_string(), dst.to_string()),
        ("bf16[9]@R{}=1(_)".into(), "bf16[9]@G{g:3}=6,1,3(_)".into())
    );
    assert_eq!(Group::new(vec![Rank(1), Rank(1)]), Err(CollectiveError::Repeated(Rank(1))));
    assert_eq!(Group::new(vec![]), Err(CollectiveError::EmptyGroup));
}

#[test]
fn counts_may_differ() {
    let group = group(3);
    let gather = Call::new(Collective::AllGather, &group, DType::I32, 0);
    let (src, _) = gather.clone().with_counts(Counts::PerRank(vec![2, 0, 5])).layouts().unwrap().remove(0);
    assert_eq!(src.to_string(), "i32[7]@G{g:3}=0-2(g[0,2,2,7])");
    let few = gather.clone().with_counts(Counts::PerRank(vec![2, 5])).layouts();
    assert_eq!(few, Err(CollectiveError::Counts { collective: Collective::AllGather, given: 2, wanted: 3 }));
    let rows = vec![vec![0, 1, 2], vec![3, 0, 0], vec![0, 0, 4]];
    let all =
        Call::new(Collective::AllToAll, &group, DType::I32, 0).with_counts(Counts::PerPair(rows.clone()));
    let plan = planned(&all, &cluster(3, 1), Algorithm::Auto, false);
    seconds(&plan);
    let moved: Vec<(u32, u32, u64)> = plan.transfers().iter().map(|t| (t.src.0, t.dst.0, t.bytes)).collect();
    assert_eq!(moved, [(0, 1, 4), (0, 2, 8), (1, 0, 12)]);
    let wrong = gather.with_counts(Counts::PerPair(rows)).layouts();
    assert_eq!(wrong, Err(CollectiveError::NoCounts(Collective::AllGather)));
}

#[test]
fn says_which_algorithms_there_are() {
    let call = Call::new(Collective::AllReduce, &group(3), DType::F32, 10);
    let tree = CollectiveOptions { algorithm: Algorithm::Tree, fixed_order: true, ..Default::default() };
    let error = plan(std::slice::from_ref(&call), &cluster(3, 1), &tree).unwrap_err().to_string();
    assert_eq!(
        error,
        "there is no tree for all-reduce in a fixed order\nhint: use one of direct, pairwise, two-level, ring, or auto"
    );
    // Whole numbers have no order to keep.
    let call = Call { dtype: DType::I32, ..call };
    assert!(plan(&[call], &cluster(3, 1), &tree).is_ok());
}

#[test]
fn names_are_read_as_people_write_them() {
    for collective in Collective::ALL {
        assert_eq!(collective.name().parse(), Ok(collective));
    }
    assert_eq!("allreduce".parse(), Ok(Collective::AllReduce));
    assert_eq!("ALL_GATHER".parse(), Ok(Collective::AllGather));
    assert!(matches!("allredcue".parse::<Collective>(), Err(CollectiveError::Unknown(_))));
    for algorithm in Algorithm::CONCRETE {
        assert_eq!(algorithm.name().parse(), Ok(algorithm));
    }
}

#[test]
fn what_is_made_of_a_part_may_take_its_place() {
    let one_place = |collective, algorithm, fixed| {
        let call = Call::new(collective, &group(4), DType::F32, 1000);
        let plan = planned(&call, &cluster(2, 2), algorithm, fixed);
        let places: Vec<bool> = (0..4).map(|r| in_place(&plan, Rank(r)).is_some()).collect();
        places.iter().all(|p| *p)
    };
    for algorithm in
        [Algorithm::Pairwise, Algorithm::Ring, Algorithm::Tree, Algorithm::TwoLevel, Algorithm::Flow]
    {
        assert!(one_place(Collective::AllReduce, algorithm, false), "{algorithm}");
    }
    assert!(!one_place(Collective::AllReduce, Algorithm::Direct, false));
    // The third and fourth rank's own part comes behind others.
    assert!(!one_place(Collective::AllReduce, Algorithm::Pairwise, true));
    assert!(one_place(Collective::AllReduce, Algorithm::Ring, true));
    assert!(one_place(Collective::ReduceScatter, Algorithm::Direct, false));
    assert!(one_place(Collective::Broadcast, Algorithm::Tree, false));
}
