//! `crossmesh bench collective`: every collective, between real processes, with results that are looked at.

mod common;

use common::{ok, refused};
use crossmesh_testkit::machine::needs_root;
use serde_json::Value;

fn measured(args: &[&str]) -> Value {
    let bench = ["bench", "collective", "--repeat", "2", "--format", "json"];
    let results = ok(&[&bench[..], args].concat()).json();
    assert_eq!(results["schema"], "crossmesh.collectives/1");
    assert_eq!(results["wrong"], Value::Array(vec![]));
    results
}

fn rows(results: &Value) -> &Vec<Value> {
    results["results"].as_array().unwrap()
}

#[test]
fn all_collectives_are_measured_over_shared_memory() {
    let results = measured(&["-n", "3", "-b", "1KiB", "-e", "64KiB", "-f", "8"]);
    let names: Vec<&str> = rows(&results).iter().map(|r| r["collective"].as_str().unwrap()).collect();
    assert_eq!(names.len(), 7 * 3 + 1, "{names:?}");
    for row in rows(&results) {
        assert_eq!(row["measured"]["measured_s"].as_array().unwrap().len(), 2);
        assert_eq!(row["measured"]["verified"], true);
        assert_eq!(row["algbw_bytes_per_s"].as_f64().unwrap() > 0.0, row["collective"] != "barrier", "{row}");
    }
    let of = |name: &str| rows(&results).iter().find(|r| r["collective"] == name).unwrap();
    let ratio =
        |row: &Value| row["busbw_bytes_per_s"].as_f64().unwrap() / row["algbw_bytes_per_s"].as_f64().unwrap();
    assert!((ratio(of("all-reduce")) - 4.0 / 3.0).abs() < 1e-9);
    assert!((ratio(of("all-gather")) - 2.0 / 3.0).abs() < 1e-9);
    assert!((ratio(of("broadcast")) - 1.0).abs() < 1e-9);
}

#[test]
fn algorithms_dtypes_and_groups_are_as_asked() {
    for algorithm in ["direct", "pairwise", "ring", "two-level"] {
        let args = ["all-reduce", "-n", "4", "--devices-per-host", "2", "--bytes", "100KB", "--fixed-order"];
        let results = measured(&[&args[..], &["--algorithm", algorithm]].concat());
        assert_eq!(rows(&results)[0]["algorithm"], algorithm);
    }
    let args =
        ["all-reduce", "reduce-scatter", "--groups", "2", "-n", "4", "--bytes", "999", "--dtype", "bf16"];
    for op in ["max", "mean"] {
        let results = measured(&[&args[..], &["--op", op]].concat());
        assert_eq!((&results["groups"], &results["op"]), (&2.into(), &op.into()));
    }
}

#[test]
fn emulated_hosts_reduce_no_faster_than_their_nics() {
    needs_root();
    let args =
        ["all-reduce", "-n", "3", "--devices-per-host", "1", "--bytes", "1MiB", "--emulate", "200Mbit"];
    let results = measured(&args);
    let row = &rows(&results)[0];
    let over = row["measured"]["over_bound"].as_f64().unwrap();
    assert!(over >= 0.9, "{row}");
}

#[test]
fn what_cannot_be_done_is_refused() {
    let refused = |args: &[&str]| refused(&[&["bench", "collective"][..], args].concat());
    let tree = refused(&["all-reduce", "--algorithm", "tree", "--fixed-order", "--predict"]);
    assert!(tree.starts_with("error: there is no tree for all-reduce in a fixed order\nhint: "), "{tree}");
    for (args, why) in [
        (&["--groups", "3"][..], "4 ranks do not make 3 groups"),
        (&["--op", "product"], "reductions are sum, max, min and mean"),
        (&["--dtype", "f8e4m3"], "dtypes are f32 f64 bf16 f16 i32 i64"),
        (&["--algorithm", "rings"], "algorithms are auto, direct"),
        (&["-b", "4KiB", "-e", "1KiB"], "there are no sizes"),
        (&["all-reduces"], "collectives are all-reduce"),
        (&["--chunk", "1", "--predict"], "chunk of 1 B"),
    ] {
        let said = refused(args);
        assert!(said.contains(why), "{args:?}: {said}");
    }
}
