//! The paper's cases under the baselines, against the latencies known for them, in units of t: the time of the whole
//! tensor through one NIC. The clock is the slow one of [`super::testing`]; `tests/paper_table.rs` has the same table at
//! its real sizes under the simulator.

use super::strategy::{PlanOptions, Scheduler, Strategy, plan};
use super::testing::{in_t, problem};

/// Small shapes that divide as the real ones do; the time in t does not depend on the size.
const TENSOR: &str = "i32[64,64,8]";

fn t(src: &str, dst: &str, strategy: Strategy) -> f64 {
    let options = PlanOptions { strategy, ..PlanOptions::default() };
    in_t(&plan(&problem(&[(src, dst)]), &options).unwrap())
}

#[test]
fn one_device_to_many() {
    let cases = [
        ("x:1,y:1", [1.0, 1.0, 1.0]),
        ("x:1,y:2", [2.0, 1.0, 1.0]),
        ("x:1,y:3", [3.0, 3.0, 1.0]),
        ("x:1,y:4", [4.0, 1.0, 1.0]),
        ("x:2,y:2", [4.0, 4.0, 1.0]),
        ("x:3,y:2", [6.0, 6.0, 1.0]),
        ("x:4,y:2", [8.0, 8.0, 1.0]),
    ];
    let strategies = [Strategy::SendRecv, Strategy::AllGather, Strategy::Broadcast(Scheduler::Balance)];
    for (mesh, expect) in cases {
        let (src, dst) = ("i32[4096]@A{x:1,y:1}(_)", format!("i32[4096]@B{{{mesh}}}(_)"));
        let found = strategies.map(|s| t(src, &dst, s));
        assert!(
            found.iter().zip(expect).all(|(f, e)| (f - e).abs() < 0.01),
            "{mesh}: {found:?}, not {expect:?}"
        );
    }
}

#[test]
fn many_devices_to_many() {
    let a = |spec: &str| format!("{TENSOR}@A{{x:2,y:4}}({spec})");
    let b = |spec: &str| format!("{TENSOR}@B{{x:2,y:4}}({spec})");
    let any = f64::NAN;
    let cases = [
        ("1", a("x,_,_"), b("x,_,_"), [2.0, 0.5, 0.5, 0.5, 0.5]),
        ("2", a("_,_,_"), b("x,_,_"), [2.0, 0.5, 1.0, 0.5, 0.5]),
        ("3", a("_,x,_"), b("x,_,_"), [3.0, 0.75, 0.75, 0.75, 0.5]),
        ("4", a("_,x+y,_"), b("x+y,_,_"), [0.75, 0.75, 0.75, 0.75, any]),
        ("5", a("y,_,_"), b("x,_,_"), [2.0, 0.5, 1.0, any, 0.5]),
        (
            "6",
            "i32[96,64,17]@A{x:2,y:4}(x,_,_)".into(),
            "i32[96,64,17]@B{x:3,y:4}(x,_,_)".into(),
            [4.0, 0.5, 1.0, 1.0, 0.5],
        ),
        ("7", format!("{TENSOR}@A{{x:1,y:4}}(y,_,_)"), b("_,_,_"), [8.0, 8.0, 1.0, 1.0, 1.0]),
        ("9", a("_,x,_"), b("_,_,x"), [3.0, 0.75, 0.75, 0.75, 0.5]),
    ];
    let strategies = [
        Strategy::SendRecv,
        Strategy::AllGather,
        Strategy::Broadcast(Scheduler::Naive),
        Strategy::Broadcast(Scheduler::Balance),
        Strategy::Broadcast(Scheduler::Greedy),
    ];
    for (case, src, dst, expect) in cases {
        let found = strategies.map(|s| t(&src, &dst, s));
        let same = |(f, e): (&f64, f64)| e.is_nan() || (f - e).abs() < 0.01;
        assert!(found.iter().zip(expect).all(same), "case {case}: {found:?}, not {expect:?}");
    }
}

#[test]
fn the_range_of_the_table_holds() {
    let (src, dst) = (format!("{TENSOR}@A{{x:2,y:4}}(y,_,_)"), format!("{TENSOR}@B{{x:2,y:4}}(x,_,_)"));
    let balance = t(&src, &dst, Strategy::Broadcast(Scheduler::Balance));
    assert!((0.75..=1.0).contains(&balance), "{balance}");
}

#[test]
fn search_is_at_the_bound_where_greedy_is() {
    let cases = [("_,x,_", "x,_,_"), ("y,_,_", "x,_,_"), ("_,x,_", "_,_,x"), ("_,_,_", "x,_,_")];
    for (src, dst) in cases {
        let (src, dst) = (format!("{TENSOR}@A{{x:2,y:4}}({src})"), format!("{TENSOR}@B{{x:2,y:4}}({dst})"));
        assert_eq!(t(&src, &dst, Strategy::Broadcast(Scheduler::Dfs)), 0.5, "{src} {dst}");
    }
    let (src, dst) = ("i32[96,64,17]@A{x:2,y:4}(x,_,_)", "i32[96,64,17]@B{x:3,y:4}(x,_,_)");
    assert_eq!(t(src, dst, Strategy::Broadcast(Scheduler::Dfs)), 0.5);
}
