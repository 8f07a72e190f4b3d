//! Measured traces: in the simulator's format, by one clock, beside the prediction.

mod common;

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::{Scratch, crossmesh, ok};
use crossmesh_testkit::machine::{eventually, needs_root};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(20);
/// r0 to r1 to r2, each on its own host.
const CHAIN: [&str; 2] = ["f32[256,256]@A{h:1}(_,_)", "f32[256,256]@B{h:2,g:1}(_,_)"];

fn read(path: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_measured_trace_stands_beside_the_prediction() {
    let scratch = Scratch::new();
    let (plan, predicted, measured) = (scratch.at("plan.json"), scratch.at("p.json"), scratch.at("m.json"));
    ok(&["plan", CHAIN[0], CHAIN[1], "-o", &plan]);
    ok(&["simulate", &plan, "--trace", &predicted]);
    ok(&["run", &plan, "--trace", &measured]);
    let (p, m) = (read(&predicted), read(&measured));
    assert_eq!(
        (&p["crossmesh"]["schema"], &p["crossmesh"]["source"]),
        (&"crossmesh.trace/1".into(), &"predicted".into())
    );
    assert_eq!(m["crossmesh"]["source"], "measured");
    // Processes of one machine read one clock.
    assert_eq!(m["crossmesh"]["clock_error_s"], 0.0);
    let names = |v: &Value| {
        let events = v["traceEvents"].as_array().unwrap().iter().filter(|e| e["name"] == "process_name");
        events.map(|e| e["args"]["name"].as_str().unwrap().to_string()).collect::<Vec<_>>()
    };
    assert_eq!(names(&p), ["h0 predicted", "h1 predicted", "h2 predicted"]);
    assert_eq!(names(&m).len(), 6);
    let (of_p, of_m) = (&p["crossmesh"]["ops"], &m["crossmesh"]["ops"]);
    for (a, b) in of_p.as_array().unwrap().iter().zip(of_m.as_array().unwrap()) {
        assert_eq!((&a["rank"], &a["op"], &a["what"]), (&b["rank"], &b["op"], &b["what"]));
        assert!(b["end_s"].as_f64().unwrap() >= b["start_s"].as_f64().unwrap());
    }
    assert_eq!(of_p.as_array().unwrap().len(), of_m.as_array().unwrap().len());
    // The two can be compared: loopback is no NIC, so they differ.
    let said = crossmesh(&["diff", &predicted, &measured]);
    assert_eq!((said.code, said.last_line().starts_with("the traces differ")), (1, true), "{}", said.stdout);
    let same = ok(&["diff", &predicted, &predicted, "--format", "json"]).json();
    assert_eq!((&same["schema"], &same["same"]), (&"crossmesh.trace-diff/1".into(), &true.into()));
    assert_eq!(crossmesh(&["diff", &predicted, &plan]).code, 2);
}

/// A rank of a job that somebody else started, whose clock is that many seconds ahead.
fn rank(rank: u32, ahead_s: u64, port: u16, args: &[&str]) -> Child {
    let mut command = Command::new("unshare");
    command.args(["--time", "--fork", "--monotonic", &ahead_s.to_string()]);
    command.arg(env!("CARGO_BIN_EXE_crossmesh")).args(args);
    command.env("RANK", rank.to_string()).env("WORLD_SIZE", "3").env("MASTER_ADDR", "127.0.0.1");
    command.env("MASTER_PORT", port.to_string()).env("CROSSMESH_SECRET", "of a job with three clocks");
    command.env("CROSSMESH_HOST", format!("h{rank}"));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Clocks that are hours apart, and a trace in which causes come before their effects.
#[test]
fn clocks_of_several_machines_are_brought_together() {
    needs_root();
    let scratch = Scratch::new();
    let trace = scratch.at("trace.json");
    let port = crossmesh_testkit::sockets::free_port();
    let args = ["run", CHAIN[0], CHAIN[1], "--repeat", "3", "--trace", &trace, "--format", "json"];
    let ranks: Vec<Child> =
        [0, 7200, 86_400].iter().zip(0..).map(|(s, r)| rank(r, *s, port, &args)).collect();
    for mut process in ranks {
        assert!(eventually(PATIENCE, || process.try_wait().unwrap().is_some()), "a rank does not end");
        let out = process.wait_with_output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        if !out.stdout.is_empty() {
            let report: Value = serde_json::from_slice(&out.stdout).unwrap();
            // Off by an hour if the clocks were not brought together.
            assert!(
                report["measured_s"].as_array().unwrap().iter().all(|s| s.as_f64().unwrap() < 10.0),
                "{report}"
            );
        }
    }
    let doc = &read(&trace)["crossmesh"];
    let error = doc["clock_error_s"].as_f64().expect("the clocks were compared");
    assert!(error > 0.0 && error < 0.1, "{error}");
    let ops = doc["ops"].as_array().unwrap();
    let of = |rank: u64, what: &str| {
        let found =
            ops.iter().find(|op| op["rank"] == rank && op["what"].as_str().unwrap().starts_with(what));
        let time = |key: &str| found.unwrap()[key].as_f64().unwrap();
        (time("start_s"), time("end_s"))
    };
    // What is received was sent before, by clocks that agree to the error.
    for (from, to) in [(0, 1), (1, 2)] {
        let (sent, received) = (of(from, "send"), of(to, "receive"));
        assert!(received.1 + error >= sent.0, "{sent:?} {received:?} {error}");
        assert!(received.1 - sent.0 < 10.0, "{sent:?} {received:?}");
    }
}
