//! Measured means measured: what loopback takes is held against nothing but a cluster whose costs were measured.

mod common;

use common::{Scratch, ok};
use serde_json::Value;

const SRC: &str = "f32[256,64]@A{tp:2}(tp,_)";
const DST: &str = "f32[256,64]@B{tp:2}(_,tp)";
const HOSTS: &str = "latency = \"20us\"\n[[host]]\ncount = 2\ndevices = 2\nnic = \"10Gbit\"\n";

/// A run with these flags, as text and as a document.
fn run(flags: &[&str]) -> (String, Value) {
    let args = [&["run", SRC, DST][..], flags].concat();
    (ok(&args).stdout, ok(&[&args[..], &["--json"]].concat()).json())
}

#[test]
fn loopback_is_compared_with_no_nic_that_somebody_only_described() {
    let scratch = Scratch::new();
    let described = scratch.file("described.toml", HOSTS);
    let described = described.to_str().unwrap();
    for flags in [&[][..], &["--nic", "1Gbit"], &["--cluster", described], &["--latency", "5us"]] {
        let (text, report) = run(flags);
        assert!(!text.contains(" × "), "{flags:?}: {text}");
        assert!(text.contains("the two are not compared"), "{flags:?}: {text}");
        assert_eq!((&report["over_bound"], &report["over_predicted"]), (&Value::Null, &Value::Null));
        assert!(report["machine"].as_str().is_some_and(|machine| machine.contains("thread")), "{report}");
    }
}

#[test]
fn a_cluster_that_was_measured_is_compared_until_a_flag_changes_it() {
    let scratch = Scratch::new();
    let here = scratch.file("here.toml", format!("measured = \"a rack, 2026-11-19\"\n{HOSTS}"));
    let here = here.to_str().unwrap();
    let (text, report) = run(&["--cluster", here]);
    assert!(text.contains("predicted with the costs of a rack, 2026-11-19"), "{text}");
    assert!(text.contains(" × the bound, ") && text.contains(" × predicted; every element"), "{text}");
    assert!(report["over_bound"].is_f64() && report["over_predicted"].is_f64(), "{report}");
    // A plan of that cluster is as well: its document says where the costs are from.
    let plan = scratch.at("plan.json");
    ok(&["plan", SRC, DST, "--cluster", here, "-o", &plan]);
    assert!(ok(&["run", &plan, "--json"]).json()["over_predicted"].is_f64());
    for flag in [["--nic", "5Gbit"], ["--latency", "1us"], ["--local", "1GB/s"], ["--nics", "2"]] {
        let (text, report) = run(&["--cluster", here, flag[0], flag[1]]);
        assert!(text.contains("not compared") && report["over_bound"].is_null(), "{flag:?}: {text}");
    }
}

#[test]
fn benches_on_loopback_name_the_machine_and_compare_nothing() {
    let scratch = Scratch::new();
    let page = scratch.at("bench.html");
    let reshard = ["bench", "reshard", "--case", "1-to-m 1x1", "--tensor-bytes", "64KiB", "--repeat", "1"];
    let text = ok(&[&reshard[..], &["--html", &page]].concat()).stdout;
    assert!(!text.contains('×') && text.contains("the two are not compared"), "{text}");
    let html = std::fs::read_to_string(&page).unwrap();
    assert!(html.contains("the two are not compared") && !html.contains("× predicted"), "a card of loopback");
    let results = ok(&[&reshard[..], &["--json"]].concat()).json();
    let measured = &results["cases"][0]["strategies"][0]["measured"];
    assert!(measured["median_s"].is_f64() && measured["over_bound"].is_null(), "{results}");
    assert!(results["machine"].is_string());

    let collective = ["bench", "collective", "all-reduce", "-n", "2", "--bytes", "4KiB", "--repeat", "1"];
    assert!(ok(&collective).stdout.contains("the two are not compared"));
    let results = ok(&[&collective[..], &["--json"]].concat()).json();
    let measured = &results["results"][0]["measured"];
    assert!(measured["over_bound"].is_null() && measured["over_predicted"].is_null(), "{results}");
    assert!(results["machine"].is_string());
    // Predicted is of no machine.
    let predicted = ok(&["bench", "collective", "all-reduce", "--predict", "--json"]).json();
    assert!(predicted["machine"].is_null());
}
