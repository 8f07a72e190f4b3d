//! The bound against enumeration: every set of nodes, and every plan.

use crossmesh_core::cluster::{Cluster, Group, Host, Tier};
use crossmesh_core::id::HostId;
use crossmesh_core::reshard::problem::Hosts;
use crossmesh_core::reshard::{Bound, Problem, lower_bound};
use crossmesh_testkit::optimum::{Allowed, Optimum, optimum};
use crossmesh_testkit::seed::{Seed, Shape, problem};
use crossmesh_testkit::{cuts, sweep};

/// Whole values, on up to 4 and 4 hosts, with rates that differ from host to host.
#[test]
fn the_bound_is_no_less_than_the_worst_set_of_nodes() {
    let shape = Shape { hosts: 4, devices: 3, dims: 2, dim_len: 9, tensors: 2, partial: false };
    let (mut checked, mut out_bound) = (0, 0);
    for seed in 0..400 {
        let mut problem = problem(seed, shape);
        if problem.cluster.hosts.len() > 12 {
            continue;
        }
        for (h, host) in problem.cluster.hosts.iter_mut().enumerate() {
            let slow = 1.0 + ((seed as usize + h) % 3) as f64;
            host.nic_out_bytes_per_s /= slow;
            host.nic_in_bytes_per_s /= 1.0 + (h % 2) as f64;
        }
        let bound = lower_bound(&problem).unwrap();
        let expected = cuts::bound_s(&problem);
        // Capacities are whole bytes, so tiny problems are off by a byte or so.
        let slack = 4.0 / 1.25e9 * 3.0;
        assert!(
            bound.seconds >= expected - slack - 1e-9 * expected,
            "seed {seed}: {} s ({}), enumeration says {expected} s",
            bound.seconds,
            bound.reason
        );
        checked += usize::from(expected > 0.0);
        out_bound += usize::from(bound.reason.contains("out"));
    }
    assert!(checked >= 200, "only {checked} problems had anything to move");
    assert!(out_bound >= 20, "only {out_bound} problems were limited by sending");
}

/// Up to five hosts and devices, any of which may be idle; rates, NICs and racks of all kinds; meshes anywhere, sums
/// and maxima over some of their axes.
fn small_problem(seed: &mut Seed) -> Option<Problem> {
    let num_hosts = 1 + seed.below(5);
    let alike = seed.one_in(2);
    let hosts: Vec<Host> = (0..num_hosts).map(|_| random_host(seed, num_hosts, alike)).collect();
    let mut cluster = Cluster::of_hosts(hosts);
    if num_hosts > 2 && seed.one_in(4) {
        let group = |hosts: &[u32], rate: f64| Group {
            hosts: hosts.iter().map(|&h| HostId(h)).collect(),
            out_bytes_per_s: rate,
            in_bytes_per_s: rate,
        };
        let groups = vec![group(&[0, 1], 1e9 * (1 + seed.below(3)) as f64), group(&[2], 2e9)];
        cluster.tiers.push(Tier { name: "rack".into(), groups });
    }
    let num_devices = cluster.num_devices();
    if num_devices > 5 {
        return None;
    }
    let dims: Vec<usize> = (0..1 + seed.below(2)).map(|_| 1 + seed.below(3)).collect();
    let src = random_layout(seed, "A", num_devices, &dims, true);
    let dst = random_layout(seed, "B", num_devices, &dims, false);
    let pair = (String::new(), src.parse().unwrap(), dst.parse().unwrap());
    let problem = Problem::new(vec![pair], Hosts::Described(cluster)).unwrap();
    Some(problem)
}

/// Hosts with a device each, sums over some of them wanted on some of them: where every message counts.
fn busy_problem(seed: &mut Seed) -> Option<Problem> {
    let num_hosts = 3 + seed.below(3);
    let alike = !seed.one_in(4);
    let speed = |seed: &mut Seed| if alike { 1e9 } else { 1e9 * (1 + seed.below(2)) as f64 };
    let host = |seed: &mut Seed| Host {
        nic_out_bytes_per_s: speed(seed),
        nic_in_bytes_per_s: speed(seed),
        ..Host::with_devices(1)
    };
    let cluster = Cluster::of_hosts((0..num_hosts).map(|_| host(seed)).collect());
    let (parts, receivers) = (2 + seed.below(num_hosts - 1), 2 + seed.below(num_hosts - 1));
    let first = seed.below(num_hosts - receivers + 1);
    let src = match (parts, seed.one_in(4)) {
        (4, true) => "f32[2]@A{x:2,y:2}=0-3(_ | sum x)".to_string(),
        _ => format!("f32[2]@A{{x:{parts}}}=0-{}(_ | sum x)", parts - 1),
    };
    let split = seed.pick(&["_", "_", "x"]);
    let dst = format!("f32[2]@B{{x:{receivers}}}={first}-{}({split})", first + receivers - 1);
    let pair = (String::new(), src.parse().unwrap(), dst.parse().unwrap());
    Some(Problem::new(vec![pair], Hosts::Described(cluster)).unwrap())
}

fn random_host(seed: &mut Seed, num_hosts: usize, alike: bool) -> Host {
    let most = if num_hosts == 1 { 5 } else { seed.pick(&[1, 1, 3]) };
    let devices = 1 + seed.below(most) as u32;
    let speed = |seed: &mut Seed| if alike { 1e9 } else { 1e9 * (1 + seed.below(3)) as f64 };
    Host {
        nics: if seed.one_in(3) { devices } else { 1 },
        nic_out_bytes_per_s: speed(seed),
        nic_in_bytes_per_s: speed(seed),
        local_bytes_per_s: seed.pick(&[2e9, 1000e9, 1000e9]),
        ..Host::with_devices(devices)
    }
}

fn random_layout(seed: &mut Seed, mesh: &str, num_devices: usize, dims: &[usize], partial: bool) -> String {
    let axes: Vec<usize> = match (seed.below(3), num_devices) {
        (0, 4..) => vec![2, 2],
        _ if partial => vec![(1 + seed.below(num_devices)).max(2).min(num_devices)],
        _ => vec![1 + seed.below(num_devices)],
    };
    let mut ranks: Vec<usize> = (0..num_devices).collect();
    (0..ranks.len()).for_each(|i| {
        let j = i + seed.below(ranks.len() - i);
        ranks.swap(i, j);
    });
    let (mut terms, mut summed) = (vec![String::from("_"); dims.len()], vec![]);
    for axis in 0..axes.len() {
        match seed.below(dims.len() + if partial { 3 } else { 1 }) {
            d if d < dims.len() && terms[d] == "_" => terms[d] = format!("x{axis}"),
            d if d > dims.len() => summed.push(format!("x{axis}")),
            _ => {}
        }
    }
    let op = seed.pick(&["sum", "max"]);
    let sum = if summed.is_empty() { String::new() } else { format!(" | {op} {}", summed.join("+")) };
    let join = |items: Vec<String>| items.join(",");
    let axes_text = join(axes.iter().enumerate().map(|(a, len)| format!("x{a}:{len}")).collect());
    let listed = join(ranks[..axes.iter().product()].iter().map(usize::to_string).collect());
    let shape = join(dims.iter().map(usize::to_string).collect());
    format!("f32[{shape}]@{mesh}{{{axes_text}}}={listed}({}{sum})", join(terms))
}

/// Whether a bound says that it holds only for plans that send nothing to a host twice.
fn is_restricted(bound: &Bound) -> bool {
    bound.reason.contains("if no host")
}

/// Of plans that may do anything, or what a bound that says so takes for granted.
fn optimum_for(bound: &Bound, problem: &Problem) -> Option<Optimum> {
    optimum(problem, if is_restricted(bound) { Allowed::NothingTwice } else { Allowed::All })
}

/// How bounds compare with optima.
#[derive(Default)]
struct Compared {
    count: usize,
    sums: usize,
    exact: usize,
    ratio: f64,
    least: f64,
}

impl Compared {
    fn add(&mut self, ratio: f64, is_sum: bool) {
        self.least = if self.count == 0 { ratio } else { self.least.min(ratio) };
        self.count += 1;
        self.sums += usize::from(is_sum);
        self.exact += usize::from(ratio > 1.0 - 1e-6);
        self.ratio += ratio;
    }
}

/// Four hosts add and three of them want the sum: what these have to send is the limit, and not what all NICs can send together, 5/4.
#[test]
fn those_who_want_what_more_add_up_pass_it_on() {
    let cluster = Cluster::of_hosts(vec![Host::with_devices(1); 4]);
    let pair =
        (String::new(), "f32[2]@A{x:4}(_ | sum x)".parse().unwrap(), "f32[2]@B{x:3}=0-2(_)".parse().unwrap());
    let problem = Problem::new(vec![pair], Hosts::Described(cluster)).unwrap();
    let tensor_s = 8.0 / problem.cluster.hosts[0].out_bytes_per_s();
    let (bound, best) = (lower_bound(&problem).unwrap(), optimum(&problem, Allowed::All).unwrap());
    assert!((bound.seconds / tensor_s - 9.0 / 7.0).abs() < 1e-9, "{bound:?}");
    assert!((best.at_least_s / tensor_s - 9.0 / 7.0).abs() < 1e-6, "{best:?}");
}

/// The bound is never above the fastest of all plans; and how far below, over problems with something to move.
#[test]
fn no_plan_at_all_is_faster_than_the_bound() {
    let wanted = sweep::count(500);
    let mut seed = Seed(11);
    let (mut compared, mut idle, mut overlapping, mut messages, mut helped, mut restricted) =
        (Compared::default(), 0, 0, 0, 0, 0);
    while compared.count < wanted {
        let start = seed.0;
        let draw = if seed.one_in(2) { busy_problem } else { small_problem };
        let Some(problem) = draw(&mut seed) else { continue };
        let reshard = &problem.reshards[0];
        let is_sum = reshard.src.layout.num_contributions() > 1;
        if !is_sum && !seed.one_in(3) {
            continue;
        }
        let bound = lower_bound(&problem).unwrap();
        let Some(optimum) = optimum_for(&bound, &problem) else { continue };
        let text = || format!("seed {start}: {} -> {}", reshard.src.layout, reshard.dst.layout);
        assert!(optimum.at_most_s <= optimum.at_least_s * (1.0 + 1e-6), "{}: {optimum:?}", text());
        assert!(
            bound.seconds <= optimum.at_least_s * (1.0 + 1e-6),
            "{}: {bound:?} is above {optimum:?} on {:#?}",
            text(),
            problem.cluster
        );
        if optimum.at_most_s > 0.0 {
            messages += usize::from(bound.reason.contains("all messages"));
            helped += usize::from(bound.reason.contains("others helping"));
            restricted += usize::from(is_restricted(&bound));
            compared.add(bound.seconds / optimum.at_most_s, is_sum);
            idle += usize::from(problem.meshes_of_ranks().len() < problem.cluster.num_devices());
            overlapping += usize::from(reshard.src.ranks.iter().any(|r| reshard.dst.ranks.contains(r)));
        }
    }
    let Compared { count, sums, exact, ratio, least } = compared;
    let mean = ratio / count as f64;
    eprintln!(
        "{count} problems, {sums} with sums, {idle} with idle devices, {overlapping} with overlapping meshes: the bound is \
         {mean:.4} of the optimum on average, {least:.3} at least, and equal to it {exact} times; all messages count in \
         {messages}, with helpers in {helped}; {restricted} are held to plans that send nothing to a host twice"
    );
    assert!(sums > count / 2 && idle > count / 8 && overlapping > count / 5);
    assert!(messages > count / 20 && helped > count / 200);
    assert!(restricted < count / 4, "most bounds hold for all plans, {restricted} of {count} do not");
    assert!(mean > 0.9, "{mean}");
}
