//! `crossmesh schedule`: the document, the golden values, the pictures, and what is refused.

mod common;

use common::{Scratch, crossmesh, crossmesh_reading, ok, refused};
use serde_json::Value;

fn args<'a>(name: &'a str, stages: &'a str, microbatches: &'a str) -> Vec<&'a str> {
    vec!["schedule", name, "--stages", stages, "--microbatches", microbatches]
}

fn document(name: &str, stages: &str, microbatches: &str, more: &[&str]) -> Value {
    let command = [&args(name, stages, microbatches)[..], more, &["--format", "json"]].concat();
    ok(&command).json()
}

fn makespan(name: &str, stages: &str, microbatches: &str, more: &[&str]) -> f64 {
    document(name, stages, microbatches, more)["makespan"].as_f64().unwrap()
}

fn peaks(doc: &Value) -> Vec<f64> {
    let devices = doc["devices"].as_array().unwrap();
    devices.iter().map(|d| d["peak_activations"].as_f64().unwrap()).collect()
}

#[test]
fn the_document_has_every_pass_with_its_times() {
    let doc = document("interleaved-1f1b", "2", "4", &["--chunks", "2", "--comm", "0.25"]);
    assert_eq!(doc["schema"], "crossmesh.schedule/1");
    assert!(doc["bubble"].as_f64().unwrap() > 0.0);
    let devices = doc["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 2);
    for (d, device) in devices.iter().enumerate() {
        let ops = device["ops"].as_array().unwrap();
        assert_eq!(ops.len(), 2 * 2 * 4);
        let mut now = 0.0;
        for op in ops {
            let (start, end) = (op["start"].as_f64().unwrap(), op["end"].as_f64().unwrap());
            assert!(start >= now, "one pass at a time");
            now = end;
            let (stage, chunk) = (op["stage"].as_u64().unwrap(), op["chunk"].as_u64().unwrap());
            assert_eq!(stage, chunk * 2 + d as u64, "round robin");
            let cost = if op["op"] == "F" { 0.5 } else { 1.0 };
            assert!((end - start - cost).abs() < 1e-9, "{op}");
        }
    }
    assert_eq!(
        doc["devices"][0]["ops"][0],
        serde_json::json!({ "op": "F", "stage": 0, "chunk": 0, "microbatch": 0, "start": 0.0, "end": 0.5 })
    );
    assert_eq!(doc["messages"][0]["what"], "activation");
}

#[test]
fn golden_values() {
    for name in ["gpipe", "1f1b", "eager-1f1b"] {
        assert_eq!([makespan(name, "4", "8", &[]), makespan(name, "8", "32", &[])], [33.0, 117.0], "{name}");
    }
    let chunks = |v, p, m| makespan("interleaved-1f1b", p, m, &["--chunks", v]);
    assert_eq!([chunks("2", "4", "8"), chunks("4", "4", "8")], [28.5, 26.25]);
    assert_eq!([chunks("2", "8", "32"), chunks("4", "8", "32")], [106.5, 101.25]);
    assert_eq!([makespan("zb-h1", "4", "8", &[]), makespan("zb-h1", "8", "32", &[])], [27.0, 103.0]);
    assert_eq!(peaks(&document("1f1b", "4", "8", &[])), [4.0, 3.0, 2.0, 1.0]);
    assert_eq!(peaks(&document("eager-1f1b", "4", "8", &[])), [7.0, 5.0, 3.0, 1.0]);
    for (name, halves, most) in [("zbv", 51.0, 8.0), ("v-half", 53.0, 6.0), ("v-min", 59.0, 4.0)] {
        let doc = document(name, "4", "8", &[]);
        assert!(2.0 * doc["makespan"].as_f64().unwrap() <= halves, "{name}");
        assert!(peaks(&doc).iter().all(|p| *p <= most), "{name}");
    }
    assert!(peaks(&document("bpipe", "8", "32", &[])).iter().all(|p| *p <= 5.0));
    assert_eq!(makespan("eager-1f1b", "4", "16", &["--comm", "1"]), 63.0);
}

#[test]
fn text_shows_rows_bubbles_and_the_answer_last() {
    let said = ok(&args("1f1b", "2", "2"));
    assert_eq!(
        said.stdout,
        "schedule 1f1b   2 stages, 2 microbatches\n\n\
         device 0  F0 F1 ......BW0   ...BW1     idle 33.3 %  peak 2\n\
         device 1  ...F0 BW0   F1 BW1   ......  idle 33.3 %  peak 1\n\n\
         F forward, BW backward, . idle\n\
         bubble: ramp 16.7 %, dependency 16.7 %; inside a step 33.3 %\n\
         busiest: every device, computes 6 of 9\n\
         critical path: 0F0 1F0…1BW1 (4) 0BW1; passes 9, messages 0\n\
         1.500 × 6, which no schedule of these layers on these devices beats\n\
         makespan 9, bubble 33.3 %, 2 activations of its layers at most on device 0\n"
    );
    let said = ok(&[&args("eager-1f1b", "2", "3")[..], &["--comm", "1"]].concat());
    assert!(said.stdout.contains("sends") && said.stdout.contains(">>>"), "{}", said.stdout);
    let narrow = ok(&[&args("zbv", "4", "64")[..], &["--width", "60"]].concat());
    assert!(narrow.stdout.lines().all(|line| line.chars().count() < 130), "{}", narrow.stdout);
}

#[test]
fn compare_tables_all_of_them() {
    let said = ok(&["schedule", "compare", "--stages", "4", "--microbatches", "8", "--comm", "0.1"]);
    for name in ["gpipe", "1f1b", "zb-h2", "v-half", "bpipe", "dualpipev", "minimal-window", "search"] {
        assert!(said.stdout.contains(&format!("  {name} ")), "{name}");
    }
    assert_eq!(said.last_line(), "shortest: search");
    let command = [
        "schedule",
        "compare",
        "--stages",
        "4",
        "--microbatches",
        "6",
        "--memory-cap",
        "2.5",
        "--format",
        "json",
    ];
    let doc = ok(&command).json();
    let entry = |name: &str| {
        let schedules = doc["schedules"].as_array().unwrap();
        schedules.iter().find(|e| e["name"] == name).unwrap().clone()
    };
    assert!(entry("gpipe")["why_not"].as_str().unwrap().contains("more than its cap of 2.5"));
    assert!(entry("interleaved-1f1b")["why_not"].as_str().unwrap().contains("no multiple of 4"));
    assert!(entry("search")["figures"]["peak_memory"].as_f64().unwrap() <= 2.5);
}

#[test]
fn the_model_and_the_devices_are_two_things() {
    // The heavy slices of the model are wherever a schedule puts them; the slow device is the same in all.
    let model = [
        "--stages",
        "4",
        "--microbatches",
        "8",
        "--f",
        "1,1,1,2",
        "--speed",
        "1,1,0.5,1",
        "--format",
        "json",
    ];
    let doc = ok(&[&["schedule", "compare"][..], &model].concat()).json();
    let bound = doc["lower_bound"].as_f64().unwrap();
    for entry in doc["schedules"].as_array().unwrap().iter().filter(|e| !e["figures"].is_null()) {
        let alone = ok(&[&["schedule", entry["name"].as_str().unwrap()][..], &model].concat()).json();
        assert_eq!(alone["lower_bound"].as_f64().unwrap(), bound, "one bound for all");
        assert!(alone["makespan"].as_f64().unwrap() >= bound);
        let device = |d: usize, key: &str| alone["devices"][d][key].as_f64().unwrap();
        let work: f64 =
            [1.0, 1.0, 0.5, 1.0].iter().enumerate().map(|(d, speed)| device(d, "busy") * speed).sum();
        assert!((work - 8.0 * 13.0).abs() < 1e-9, "{entry}: the model's work is the same however it is cut");
        for d in 0..4 {
            let idle = device(d, "idle_inside") + device(d, "idle_between");
            assert!((device(d, "busy") + idle - alone["makespan"].as_f64().unwrap()).abs() < 1e-9);
            let causes = alone["devices"][d]["idle"].as_object().unwrap();
            assert!(
                (causes.values().map(|v| v.as_f64().unwrap()).sum::<f64>() - idle).abs() < 1e-9,
                "{causes:?}"
            );
        }
    }
    let search = doc["pareto"][0].as_str().unwrap();
    assert_eq!(search, doc["best"].as_str().unwrap(), "the shortest is on the front");
}

#[test]
fn memory_is_told_in_the_unit_of_its_cap() {
    let said = ok(&[&args("zbv", "4", "8")[..], &["--memory-cap", "4"]].concat());
    let peaks = said.stdout.lines().filter_map(|line| line.split_once("peak ")).map(|(_, peak)| peak.trim());
    let peaks: Vec<f64> = peaks.map(|peak| peak.parse().unwrap()).collect();
    assert!(peaks.len() == 4 && peaks.iter().all(|peak| *peak <= 4.0), "{peaks:?}");
}

#[test]
fn a_file_stands_beside_the_named_ones() {
    let scratch = Scratch::new();
    let csv = ok(&[&args("1f1b", "4", "8")[..], &["--format", "csv"]].concat()).stdout;
    scratch.file("mine.csv", &csv);
    let mine = scratch.at("mine.csv");
    let doc = ok(&["schedule", "compare", "--file", &mine, "--format", "json"]).json();
    let figures = |name: &str| {
        let entries = doc["schedules"].as_array().unwrap();
        entries.iter().find(|e| e["name"] == name).unwrap()["figures"].clone()
    };
    assert_eq!(figures("mine"), figures("1f1b"));
    let stderr = refused(&["schedule", "compare", "--file", &mine, "--stages", "2", "--microbatches", "8"]);
    assert!(stderr.contains("mine.csv has 4 devices and 8 microbatches, the others 2 and 8"), "{stderr}");
}

#[test]
fn no_step_of_a_suite_beats_its_bound() {
    let doc = ok(&["bench", "pipeline", "--predict", "--case", "GPT", "--format", "json"]).json();
    for case in doc["cases"].as_array().unwrap() {
        let bound = case["lower_bound_s"].as_f64().unwrap();
        for series in case["series"].as_array().unwrap() {
            let seconds = series["predicted_s"].as_f64().unwrap();
            assert!(bound > 0.0 && seconds >= bound, "{}: {seconds} < {bound}", series["series"]);
        }
    }
}

#[test]
fn pictures_and_traces_are_files_that_open() {
    let scratch = Scratch::new();
    let (html, trace) = (scratch.at("s.html"), scratch.at("t.json"));
    ok(&[&args("zbv", "4", "8")[..], &["--comm", "0.5", "--html", &html, "--perfetto", &trace]].concat());
    let page = std::fs::read_to_string(html).unwrap();
    assert!(page.contains("<svg") && page.contains(">F</text>") && page.contains("bound 24.75"));
    assert_eq!(page.matches("<script").count(), 1, "data only");
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let passes = events.iter().filter(|e| e["ph"] == "X").count();
    assert_eq!(passes, 4 * 2 * 3 * 8);
    let many = scratch.at("c.html");
    ok(&["schedule", "compare", "--stages", "2", "--microbatches", "4", "--html", &many]);
    assert!(std::fs::read_to_string(many).unwrap().matches("<svg").count() >= 12);
}

#[test]
fn a_csv_comes_back_as_it_was() {
    let scratch = Scratch::new();
    for name in ["1f1b", "interleaved-1f1b", "zbv", "dualpipev"] {
        let csv = ok(&[&args(name, "2", "4")[..], &["--format", "csv"]].concat()).stdout;
        let path = scratch.file("s.csv", &csv);
        let path = path.to_str().unwrap();
        assert_eq!(ok(&["schedule", "--file", path, "--format", "csv"]).stdout, csv);
        let (read, made) =
            (ok(&["schedule", "--file", path, "--format", "json"]).json(), document(name, "2", "4", &[]));
        assert_eq!(read["devices"], made["devices"], "{name}");
    }
}

#[test]
fn activations_are_counted_in_bytes_too() {
    let doc = document("1f1b", "4", "8", &["--activation-bytes", "1GiB"]);
    assert_eq!(doc["devices"][0]["peak_bytes"], 4.0 * f64::from(1 << 30));
    let doc = document("zbv", "2", "4", &["--activation-bytes", "10,20,30,40"]);
    assert!(doc["devices"][1]["peak_bytes"].as_f64().unwrap() > 0.0);
}

#[test]
fn megatrons_layouts_share_out_the_work() {
    let doc = document(
        "interleaved-1f1b",
        "2",
        "4",
        &["--layout", "Et|t*2|t*2|tL", "--f", "3", "--b", "3", "--w", "3"],
    );
    let ops = doc["devices"][0]["ops"].as_array().unwrap();
    let forward = |stage: u64| {
        let op = ops.iter().find(|op| op["op"] == "F" && op["stage"] == stage).unwrap();
        op["end"].as_f64().unwrap() - op["start"].as_f64().unwrap()
    };
    assert_eq!((forward(0), forward(2)), (1.0, 2.0));
}

#[test]
fn costs_may_differ_from_stage_to_stage() {
    assert_eq!(makespan("1f1b", "2", "1", &["--f", "1,2", "--b", "3,4", "--w", "0"]), 10.0);
}

#[test]
fn what_cannot_be_is_refused_with_the_constraint() {
    let cases: [(&[&str], &str); 24] = [
        (&["1f1b", "--stages", "4", "--microbatches", "8", "--f", "-1"], "the cost of f of stage 0 is -1"),
        (&["1f1b", "--stages", "4", "--microbatches", "8", "--b", "nan"], "the cost of b of stage 0 is NaN"),
        (&["1f1b", "--stages", "4", "--microbatches", "8", "--comm", "inf"], "the cost of comm is inf"),
        (&["1f1b", "--stages", "4", "--microbatches", "8", "--f", "1,2,3"], "costs for 3 slices"),
        (
            &["1f1b", "--stages", "4", "--microbatches", "8", "--f", "1,2,3,4", "--b", "1,2"],
            "--b has 2 costs",
        ),
        (&["interleaved-1f1b", "--stages", "4", "--microbatches", "10"], "10 is no multiple of 4"),
        (&["dualpipev", "--stages", "4", "--microbatches", "7"], "at least 8 microbatches"),
        (&["zbv", "--stages", "4", "--microbatches", "8", "--chunks", "3"], "cannot have 3 chunks"),
        (&["zb-h1", "--stages", "4", "--microbatches", "8", "--backward", "fused"], "cannot be fused"),
        (&["1f1b", "--stages", "0", "--microbatches", "8"], "at least one stage"),
        (&["1f1b", "--stages", "4", "--microbatches", "0"], "at least one microbatch"),
        (&["1f1b", "--stages", "4294967295", "--microbatches", "4294967295"], "more than"),
        (&["1f1b", "--stages", "4", "--microbatches", "4000000000"], "more than"),
        (&["nope", "--stages", "4", "--microbatches", "8"], "unknown schedule `nope`"),
        (&["1f1b", "--microbatches", "8"], "--stages is missing"),
        (&["1f1b", "--stages", "2", "--microbatches", "8", "--speed", "1,0"], "the speed of device 1 is 0"),
        (&["1f1b", "--stages", "2", "--microbatches", "8", "--speed", "1,1,1"], "3 speeds for 2 devices"),
        (
            &["search", "--stages", "4", "--microbatches", "8", "--memory-cap", "0.5"],
            "no schedule fits: device 0",
        ),
        (
            &["search", "--stages", "4", "--microbatches", "8", "--memory-cap", "nan"],
            "no schedule fits: device 0",
        ),
        (
            &["search", "--stages", "4", "--microbatches", "8", "--memory-cap", "1,2"],
            "2 memory caps for 4 devices",
        ),
        (&["gpipe", "--stages", "4", "--microbatches", "8", "--memory-cap", "3"], "more than its cap of 3"),
        (
            &["1f1b", "--stages", "3", "--microbatches", "8", "--layout", "Et|tL"],
            "2 stages cannot be dealt out to 3",
        ),
        (&["1f1b", "--stages", "2", "--microbatches", "8", "--layout", "Etx|L"], "`x` at 3 is no layer"),
        (
            &["1f1b", "--stages", "4", "--microbatches", "8", "--activation-bytes", "1,2,3"],
            "3 sizes of activations",
        ),
    ];
    for (case, why) in cases {
        let stderr = refused(&[&["schedule"][..], case].concat());
        assert!(stderr.contains(why), "{case:?}: {stderr}");
    }
    let error = refused(&["schedule", "compare", "--stages", "4", "--microbatches", "8", "--w", "-2"]);
    assert!(error.contains("the cost of w of stage 0 is -2"), "{error}");
    assert_eq!(crossmesh(&["schedule"]).code, 2);
}

#[test]
fn bad_files_are_refused_with_what_is_wrong() {
    for (csv, why) in [
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "1BW1 is missing: device 1 never runs it"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "deadlock: 0BW0 on device 0 needs 1BW0"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 is on no device"),
        ("0B0,0F0\n", "device 0 runs 0BW0 before 0F0, which it needs"),
        ("0F0,0B0\n0F1,0B1\n", "stage 0 is on device 0 and on device 1"),
        ("0F0,0Q0\n", "line 1, cell 2: `0Q0`"),
        ("", "the file has no action"),
    ] {
        let said = crossmesh_reading(&["schedule", "--file", "-"], csv);
        assert_eq!(said.code, 2, "{csv}");
        assert!(
            said.stderr.starts_with("error: stdin: ") && said.stderr.contains(why),
            "{csv}: {}",
            said.stderr
        );
    }
    assert!(refused(&["schedule", "--file", "no-such.csv"]).contains("no-such.csv"));
}
