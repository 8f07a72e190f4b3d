//! `crossmesh explain --flight`, without a fault: `faults.rs` replays the records of real ones.

mod common;

use common::{Scratch, ok, refused};
use serde_json::{Value, json};

const PAIR: [&str; 2] = ["f32[64,48]@A{tp:2}(tp,_)", "f32[64,48]@B{tp:3}(_,tp)"];

/// The record of a run that went well.
fn landed(scratch: &Scratch) -> Value {
    let path = scratch.at("flight.json");
    ok(&["run", PAIR[0], PAIR[1], "--repeat", "2", "--flight", &path]);
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn explained(scratch: &Scratch, record: &Value) -> (String, Value) {
    let path = scratch.file("record.json", record.to_string());
    let path = path.to_str().unwrap();
    (ok(&["explain", "--flight", path]).stdout, ok(&["explain", "--flight", path, "--format", "json"]).json())
}

#[test]
fn a_run_that_went_well_is_explained_too() {
    let scratch = Scratch::new();
    let record = landed(&scratch);
    assert_eq!((&record["schema"], &record["verdict"]), (&json!("crossmesh.flight/1"), &Value::Null));
    assert_eq!(record["plan"]["schema"], "crossmesh.plan/1");
    let (text, replay) = explained(&scratch, &record);
    assert!(text.contains("\n  ended well after "), "{text}");
    assert!(text.lines().last().unwrap().starts_with("everything ended: "), "{text}");
    assert_eq!(replay["schema"], "crossmesh.replay/1");
    assert_eq!((&replay["held_up"], &replay["under_way"]), (&json!(0), &json!(0)));
    for rank in replay["ranks"].as_array().unwrap() {
        assert_eq!((&rank["done"], &rank["ended"]), (&rank["ops"], &json!("exit status: 0")));
    }
}

/// The same record as if r3, the second destination, had been stopped half-way through everything.
fn stalled(record: &Value) -> Value {
    let mut record = record.clone();
    record["verdict"] = json!({ "culprit": 3, "host": "h1", "text": "does not answer; somebody waited" });
    record["ranks"].as_array_mut().unwrap().retain(|rank| rank["rank"] != 3);
    for rank in record["ranks"].as_array_mut().unwrap() {
        rank["started"] = json!({ "at_ns": 1000, "clock": "one", "offset": null });
        let job = &mut rank["jobs"][0];
        (job["at_s"], job["moved_s"], job["ops_left"]) = (json!(2.0), json!(1.0), json!(0));
        let mut waits_for = Value::Null;
        for op in job["ops"].as_array_mut().unwrap().iter_mut().filter(|op| op["peer"] == 3) {
            (op["state"], op["moved"]) = (json!("moving"), json!(op["bytes"].as_u64().unwrap() / 2));
            waits_for = json!({ "peer": 3, "further": null, "job": 0, "op": op["op"] });
        }
        let open = job["ops"].as_array().unwrap().iter().filter(|op| op["state"] == "moving").count();
        job["ops_left"] = json!(open);
        rank["waits_for"] = waits_for;
    }
    record
}

#[test]
fn a_stall_is_replayed_up_to_where_it_stopped() {
    let scratch = Scratch::new();
    let (text, replay) = explained(&scratch, &stalled(&landed(&scratch)));
    let has = |line: &str| assert!(text.lines().any(|l| l.starts_with(line)), "no `{line}` in\n{text}");
    has("flight of reshard f32[64,48]  A{tp:2}(tp,_) -> B{tp:3}(_,tp)");
    has("  r3 on h1 does not answer; somebody waited");
    has("  given up 2.00 s into run 1; the last byte moved at 1.00 s");
    has("  r0 -> r3   the culprit");
    has("  r1 -> r3   the culprit");
    has("  >>  r0 send t1 to r3");
    has("4 ops unfinished because of r3; nothing else was");
    let ops = replay["ops"].as_array().unwrap();
    // Two sends that are stuck, and r3's two receives, of which only the other ends tell.
    let stuck: Vec<u64> =
        ops.iter().filter(|op| op["stuck"] == true).map(|op| op["rank"].as_u64().unwrap()).collect();
    assert_eq!((stuck, ops.len()), (vec![0, 1], 4));
    for op in ops {
        // The simulator had all of it done long before.
        assert_eq!((&op["late"], &op["held_up"]), (&json!(true), &json!(true)), "{op}");
        assert_eq!(op["moved"].as_u64().unwrap() * 2, op["bytes"].as_u64().unwrap(), "{op}");
        assert_eq!(op["predicted_moved"], op["bytes"]);
    }
    let culprits: Vec<&Value> =
        replay["ranks"].as_array().unwrap().iter().filter(|r| r["culprit"] == true).collect();
    assert_eq!(culprits.len(), 1);
    assert_eq!((&culprits[0]["rank"], &culprits[0]["recorded"]), (&json!(3), &json!(false)));
}

#[test]
fn what_is_no_flight_record_is_refused() {
    let scratch = Scratch::new();
    let record = landed(&scratch);
    let with = |change: &dyn Fn(&mut Value)| {
        let mut record = record.clone();
        change(&mut record);
        let path = scratch.file("bad.json", record.to_string());
        refused(&["explain", "--flight", path.to_str().unwrap()])
    };
    let says = |stderr: String, why: &str| assert!(stderr.contains(why), "{why}: {stderr}");
    says(with(&|r| r["schema"] = json!("crossmesh.flight/9")), "schema \"crossmesh.flight/9\"");
    says(with(&|r| drop(r.as_object_mut().unwrap().remove("schema"))), "it has no schema");
    says(with(&|r| drop(r.as_object_mut().unwrap().remove("plan"))), "either a plan or a step");
    says(with(&|r| r["plan"]["schema"] = json!("x")), "its plan");
    says(with(&|r| drop(r["plan"]["transfers"].as_array_mut().unwrap().pop())), "the plan breaks a law");
    says(with(&|r| r["ranks"][0]["rank"] = json!(99)), "r99 is recorded, and not part of what ran");
    says(with(&|r| r["ranks"][0]["jobs"][0]["ops"][0]["op"] = json!(77)), "op 77 of r0 is recorded");
    says(with(&|r| r["ranks"] = json!("all")), "not a flight record");
    let path = scratch.file("text", "not even JSON");
    says(refused(&["explain", "--flight", path.to_str().unwrap()]), "not JSON");
    says(refused(&["explain", "--flight", "/no/such/file"]), "cannot read /no/such/file");
    says(refused(&["explain"]), "nothing to plan");
}
