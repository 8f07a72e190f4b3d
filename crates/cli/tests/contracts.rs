//! What other programs rely on: documents, exit codes, where answers go.

mod common;

use common::{Scratch, binary, crossmesh, crossmesh_reading, ok, refused, said};
use serde_json::Value;

const SRC: &str = "f32[8,6]@A{tp:2}(tp,_)";
const DST: &str = "f32[8,6]@B{tp:3}(_,tp)";

fn plan_file(scratch: &Scratch, name: &str, extra: &[&str]) -> String {
    let path = scratch.at(name);
    ok(&[&["plan", SRC, DST, "-o", &path], extra].concat());
    path
}

#[test]
fn explain_and_plan_share_one_document() {
    let scratch = Scratch::new();
    let path = plan_file(&scratch, "plan.json", &[]);
    let explained = ok(&["explain", SRC, DST, "--format", "json"]);
    assert_eq!(explained.stdout, std::fs::read_to_string(path).unwrap());
    let doc = explained.json();
    assert_eq!(doc["schema"], "crossmesh.plan/1");
    assert_eq!((&doc["src"], &doc["dst"]), (&SRC.into(), &DST.into()));
    assert_eq!(doc["strategy"], "flow");
    assert_eq!(doc["bytes"], 192);
    assert_eq!(doc["devices"][2], serde_json::json!({ "rank": 2, "host": 1, "meshes": ["B"] }));
    for (field, least) in [("lower_bound_s", 1e-7), ("predicted_s", 1e-7), ("peak_extra_bytes", 0.0)] {
        assert!(doc[field].as_f64().unwrap() >= least, "{field}");
    }
    let first = &doc["transfers"][0];
    for field in ["id", "src", "dst", "region", "bytes", "link", "after"] {
        assert!(!first[field].is_null(), "{field}");
    }
}

/// The list is complete: replaying it reproduces the destination, element by element.
#[test]
fn replaying_the_transfers_fills_the_destination() {
    let doc = ok(&["explain", SRC, DST, "--format", "json"]).json();
    let mut held: Vec<Vec<bool>> = vec![vec![false; 48]; 5];
    for element in 0..48 {
        held[usize::from(element / 6 >= 4)][element] = true;
    }
    for t in doc["transfers"].as_array().unwrap() {
        let number = |v: &Value| v.as_u64().unwrap() as usize;
        let (src, dst) = (number(&t["src"]), number(&t["dst"]));
        let span = |dim: usize| number(&t["region"][dim][0])..number(&t["region"][dim][1]);
        for (row, col) in span(0).flat_map(|row| span(1).map(move |col| (row, col))) {
            assert!(held[src][row * 6 + col], "r{src} does not hold [{row}, {col}]");
            assert!(!held[dst][row * 6 + col], "r{dst} gets [{row}, {col}] twice");
            held[dst][row * 6 + col] = true;
        }
    }
    for (column, held) in held[2..].iter().enumerate() {
        let wanted: Vec<bool> = (0..48).map(|e| (e % 6) / 2 == column).collect();
        assert_eq!(*held, wanted, "r{}", column + 2);
    }
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    for strategy in ["flow", "broadcast:greedy", "auto"] {
        let run =
            || ok(&["explain", SRC, DST, "--strategy", strategy, "--format", "json", "--seed", "7"]).stdout;
        assert_eq!(run(), run(), "{strategy}");
    }
}

#[test]
fn the_last_line_of_explain_answers() {
    let said = ok(&["explain", SRC, DST]);
    assert!(
        said.stdout.starts_with("reshard f32[8,6]  A{tp:2}(tp,_) -> B{tp:3}(_,tp)   192 B in 6 transfers\n")
    );
    assert!(said.last_line().starts_with("predicted") && said.last_line().ends_with("× the bound"));
    for part in ["hosts\n", "transfers\n", "busiest links\n", "why\n", "peak extra memory", "lower bound"] {
        assert!(said.stdout.contains(part), "{part} in {}", said.stdout);
    }
}

#[test]
fn every_strategy_plans_and_verifies() {
    let scratch = Scratch::new();
    for strategy in [
        "sendrecv",
        "allgather",
        "broadcast",
        "broadcast:naive",
        "broadcast:balance",
        "broadcast:dfs",
        "flow",
        "auto",
    ] {
        let path = plan_file(&scratch, "plan.json", &["--strategy", strategy]);
        let said = ok(&["verify", &path]);
        assert_eq!(said.stdout.lines().count(), 1, "{strategy}: {}", said.stdout);
        assert!(said.stdout.contains("ok: "), "{strategy}: {}", said.stdout);
    }
}

#[test]
fn verify_says_no_with_the_law() {
    let scratch = Scratch::new();
    let text = std::fs::read_to_string(plan_file(&scratch, "plan.json", &[])).unwrap();
    let mut doc: Value = serde_json::from_str(&text).unwrap();
    doc["transfers"].as_array_mut().unwrap().pop();
    let path = scratch.file("broken.json", doc.to_string());
    let said = crossmesh(&["verify".as_ref(), path.as_os_str()]);
    assert_eq!((said.code, said.stderr.as_str()), (1, ""));
    assert!(said.stdout.contains("coverage"), "{}", said.stdout);
    let said = crossmesh(&["verify".as_ref(), path.as_os_str(), "--format=json".as_ref()]);
    assert_eq!(said.code, 1);
    assert_eq!(said.json()["ok"], false);
    assert_eq!(said.json()["violation"]["law"], "coverage");
}

#[test]
fn verify_reads_stdin() {
    let document = ok(&["explain", SRC, DST, "--format", "json"]).stdout;
    assert_eq!(crossmesh_reading(&["verify", "-"], &document).code, 0);
}

#[test]
fn simulate_predicts_what_plan_said() {
    let scratch = Scratch::new();
    let path = plan_file(&scratch, "plan.json", &[]);
    let doc: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let simulated = ok(&["simulate", &path, "--format", "json"]).json();
    assert_eq!(simulated["schema"], "crossmesh.simulation/1");
    assert_eq!(simulated["predicted_s"], doc["predicted_s"]);
    assert_eq!(simulated["lower_bound_s"], doc["lower_bound_s"]);
    let text = ok(&["simulate", &path]);
    assert!(text.stdout.contains("busiest links") && text.last_line().contains("× the bound"));
}

#[test]
fn simulate_takes_another_cluster() {
    let scratch = Scratch::new();
    let path = plan_file(&scratch, "plan.json", &[]);
    let seconds = |extra: &[&str]| {
        let said = ok(&[&["simulate", path.as_str(), "--format", "json"], extra].concat());
        said.json()["predicted_s"].as_f64().unwrap()
    };
    let slow = scratch
        .file("slow.toml", "[[host]]\ndevices = 2\nnic = '1Gbit'\n[[host]]\ndevices = 3\nnic = '1Gbit'\n");
    let (base, by_file, by_flag) =
        (seconds(&[]), seconds(&["--cluster", slow.to_str().unwrap()]), seconds(&["--nic", "1Gbit"]));
    assert!((by_file / base - 10.0).abs() < 1e-6, "{by_file} {base}");
    assert_eq!(by_file, by_flag);
}

#[test]
fn a_trace_is_json_that_perfetto_reads() {
    let scratch = Scratch::new();
    let (path, trace) = (plan_file(&scratch, "plan.json", &[]), scratch.at("trace.json"));
    ok(&["simulate", &path, "--trace", &trace]);
    let trace: Value = serde_json::from_str(&std::fs::read_to_string(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let count = |ph: &str| events.iter().filter(|e| e["ph"] == ph).count();
    assert_eq!((count("b"), count("e")), (6, 6));
    let named = events.iter().filter(|e| e["name"] == "process_name").count();
    assert_eq!(named, 2, "a process for every host");
    assert!(count("C") > 0);
}

#[test]
fn diff_answers_by_exit_code() {
    let scratch = Scratch::new();
    let src = "f32[64,64]@A{h:1,g:2}(g,_)";
    let dst = "f32[64,64]@B{h:2,g:2}(_,_)";
    let (a, b) = (scratch.at("a.json"), scratch.at("b.json"));
    ok(&["plan", src, dst, "-o", &a]);
    ok(&["plan", src, dst, "-o", &b, "--strategy", "sendrecv"]);
    assert_eq!(ok(&["diff", &a, &a]).stdout, "the plans are the same\n");
    let said = crossmesh(&["diff", &a, &b]);
    assert_eq!((said.code, said.stderr.as_str()), (1, ""));
    for part in ["strategy", "flow", "sendrecv", "predicted", "\n- ", "\n+ ", "h0 to h1"] {
        assert!(said.stdout.contains(part), "{part} in {}", said.stdout);
    }
    let json = crossmesh(&["diff", &a, &b, "--format", "json"]);
    assert_eq!((json.code, &json.json()["same"]), (1, &Value::Bool(false)));
}

#[test]
fn diff_names_tensors_and_says_when_clusters_differ() {
    let scratch = Scratch::new();
    let pair = |name: &str, n: u32| {
        format!("{name}: f32[{n},64]@A{{h:1,g:2}}(g,_) -> f32[{n},64]@B{{h:2,g:2}}(_,_)\n")
    };
    let pairs = scratch.file("pairs.txt", pair("small", 64) + &pair("large", 4096) + &pair("same", 2));
    let pairs = pairs.to_str().unwrap();
    let (a, b) = (scratch.at("a.json.gz"), scratch.at("b.json"));
    ok(&["plan", "--pairs", pairs, "-o", &a]);
    ok(&["plan", "--pairs", pairs, "-o", &b, "--strategy", "sendrecv", "--nic", "25Gbit"]);
    assert_eq!(std::fs::read(&a).unwrap()[..2], [0x1f, 0x8b], "packed, as its name says");
    ok(&["verify", &a]);
    let said = crossmesh(&["diff", &a, &b]);
    for part in
        ["cluster host 0-2 nic", "10 Gbit/s", "25 Gbit/s", "the clusters differ", "large [", "small ["]
    {
        assert!(said.stdout.contains(part), "{part} in {}", said.stdout);
    }
    let at = |part: &str| said.stdout.find(part).unwrap();
    assert!(at("large [") < at("small ["), "the largest first: {}", said.stdout);
    // What each tensor costs in both: bytes, transfers, time; the largest difference first.
    let json = crossmesh(&["diff", &a, &b, "--json"]).json();
    assert_eq!(json["clusters_differ"], true);
    let tensors = json["tensors"].as_array().unwrap();
    assert_eq!(tensors[0]["name"], "large");
    for field in ["a_bytes", "b_bytes", "a_transfers", "b_transfers", "a_s", "b_s"] {
        assert!(tensors[0][field].as_f64().unwrap() > 0.0, "{field} of {json}");
    }
    let changes: Vec<f64> =
        json["changed"].as_array().unwrap().iter().filter_map(|c| c["change"].as_f64()).collect();
    let sizes: Vec<f64> = changes.iter().map(|c| c.ln_1p().abs()).collect();
    assert!(sizes.is_sorted_by(|a, b| a >= b) && changes.iter().all(|c| *c != 0.0), "{json}");
}

#[test]
fn what_has_no_room_is_refused() {
    let scratch = Scratch::new();
    let cluster = |memory: &str| {
        let text = format!("[[host]]\ncount = 3\ndevices = 2\nnic = \"10Gbit\"\nmemory = \"{memory}\"\n");
        scratch.file("cluster.toml", text).to_str().unwrap().to_string()
    };
    // 16 KiB of f32: halves on the first host, whole on the others.
    let pair = ["f32[64,64]@A{h:1,g:2}(g,_)", "f32[64,64]@B{h:2,g:2}(_,_)"];
    let explain = |memory: &str| crossmesh(&["explain", pair[0], pair[1], "--cluster", &cluster(memory)]);
    assert_eq!(explain("16KiB").code, 0);
    let refused = explain("12KiB");
    assert_eq!(refused.code, 2);
    for part in ["device r2 of h1 has 12.0 KiB", "take 16.0 KiB", "hint: move fewer tensors"] {
        assert!(refused.stderr.contains(part), "{part} in {}", refused.stderr);
    }
}

#[test]
fn diff_sees_a_changed_order() {
    let scratch = Scratch::new();
    let a = plan_file(&scratch, "a.json", &[]);
    let mut doc: Value = serde_json::from_str(&std::fs::read_to_string(&a).unwrap()).unwrap();
    doc["transfers"][3]["after"] = serde_json::json!([0]);
    let b = scratch.file("b.json", doc.to_string());
    let said = crossmesh(&["diff", &a, b.to_str().unwrap()]);
    assert_eq!(said.code, 1);
    assert!(said.stdout.contains("order"), "{}", said.stdout);
}

#[test]
fn many_tensors_are_planned_together() {
    let scratch = Scratch::new();
    let pairs = scratch.file(
        "pairs.txt",
        "# two weights\nwq: f32[8,6]@A{tp:2}(tp,_) -> f32[8,6]@B{tp:3}(_,tp)\nf32[4]@A{tp:2}(tp) -> f32[4]@B{tp:3}(_)\n",
    );
    let pairs = pairs.to_str().unwrap();
    let by_flag = ok(&["explain", "--pairs", pairs, "--format", "json"]);
    assert_eq!(by_flag.stdout, ok(&["explain", pairs, "--format", "json"]).stdout);
    let doc = by_flag.json();
    assert_eq!(doc["tensors"].as_array().unwrap().len(), 2);
    assert_eq!(doc["tensors"][0]["name"], "wq");
    assert!(doc.get("src").is_none());
    assert!(ok(&["explain", pairs]).stdout.contains("2 tensors"));
    let text = std::fs::read_to_string(pairs).unwrap();
    let by_stdin = crossmesh_reading(&["explain", "--pairs", "-", "--format", "json"], &text);
    assert_eq!(by_stdin.stdout, by_flag.stdout);
    assert_eq!(crossmesh_reading(&["verify", "-"], &by_flag.stdout).code, 0);
}

#[test]
fn other_notations_are_read() {
    let ours = ok(&["explain", "f32[8,6]@A{x:2,y:2}(x+y,_)", DST, "--format", "json"]).stdout;
    assert_eq!(ok(&["explain", "f32[8,6]@A:2x2 S01R", DST, "--format", "json"]).stdout, ours);
}

#[test]
fn a_cluster_file_is_heard() {
    let scratch = Scratch::new();
    let cluster = scratch.file("c.toml", "[[host]]\ncount = 2\ndevices = 4\nnic = '100Gbit'\n");
    let cluster = cluster.to_str().unwrap();
    let doc = ok(&["explain", SRC, DST, "--cluster", cluster, "--format", "json"]).json();
    assert_eq!(doc["devices"].as_array().unwrap().len(), 8);
    // Ranks 2 and 3 share the source's host; only rank 4 is across the network.
    let crossing = doc["transfers"].as_array().unwrap().iter().filter(|t| t["link"] == "nic");
    assert!(crossing.clone().count() > 0 && crossing.clone().all(|t| t["dst"] == 4));
}

#[test]
fn bench_ends_with_the_worst_flow_ratio() {
    let said = ok(&["bench", "reshard", "--predict"]);
    assert!(said.last_line().starts_with("worst flow ratio over 16 cases: 1.0"), "{}", said.stdout);
    let json = ok(&["bench", "reshard", "--predict", "--format", "json"]).json();
    assert_eq!(json["schema"], "crossmesh.bench/1");
    let cases = json["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 16);
    for case in cases {
        let strategies = case["strategies"].as_array().unwrap();
        assert_eq!(strategies.len(), 7);
        for s in strategies.iter().filter(|s| s["reference_t"].is_f64()) {
            let (t, reference) = (s["t"].as_f64().unwrap(), s["reference_t"].as_f64().unwrap());
            assert!((t / reference - 1.0).abs() <= 0.05, "{}: {s}", case["name"]);
        }
        let flow = strategies.iter().find(|s| s["strategy"] == "flow").unwrap();
        let over = flow["over_bound"].as_f64().unwrap();
        assert!((0.999..=1.02).contains(&over), "{}: {over}", case["name"]);
    }
}

#[test]
fn bench_takes_a_suite_of_ones_own() {
    let scratch = Scratch::new();
    let suite = scratch.file(
        "mine.toml",
        format!("schema = 'crossmesh.suite/1'\nname = 'mine'\n[[case]]\nname = 'one'\nsrc = '{SRC}'\ndst = '{DST}'\n"),
    );
    let said = ok(&["bench", "reshard", "--predict", "--suite", suite.to_str().unwrap()]);
    assert!(said.stdout.starts_with("suite mine"));
    assert!(said.last_line().ends_with("in case one"));
}

#[test]
fn reports_are_single_pages() {
    let scratch = Scratch::new();
    let (plan, bench) = (scratch.at("plan.html"), scratch.at("bench.html"));
    ok(&["explain", SRC, DST, "--html", &plan]);
    ok(&["bench", "reshard", "--predict", "--case", "n-to-m 1", "--html", &bench]);
    for (path, parts) in
        [(plan, ["Traffic between hosts", "NICs over time"]), (bench, ["Over the bound", "n-to-m 1"])]
    {
        let html = std::fs::read_to_string(path).unwrap();
        assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
        assert!(!html.contains("src=\"http") && !html.contains("href="), "it loads nothing");
        for part in parts.iter().chain(&["boundline", "<svg", "crossmesh explain", "crossmesh bench"][..2]) {
            assert!(html.contains(part), "{part}");
        }
        let data = html.split("id=\"data\">").nth(1).unwrap().split("</script>").next().unwrap();
        serde_json::from_str::<Value>(data).unwrap();
    }
}

#[test]
fn every_command_has_help_with_examples() {
    for command in ["explain", "plan", "verify", "simulate", "diff", "completions"] {
        let said = ok(&[command, "--help"]);
        assert!(said.stdout.contains("Examples:"), "{command}");
    }
    assert!(ok(&["bench", "reshard", "--help"]).stdout.contains("Examples:"));
    assert!(ok(&["bench", "--help"]).stdout.contains("Examples:"));
}

/// `crossmesh help explain` says what `crossmesh explain --help` says; of commands below commands, too.
#[test]
fn help_knows_every_command() {
    for command in [&["explain"][..], &["train"], &["bench", "reshard"], &["checkpoint", "convert"]] {
        let help = ok(&[&["help"][..], command].concat());
        assert_eq!(help.stdout, ok(&[command, &["--help"]].concat()).stdout, "{command:?}");
        assert!(help.stdout.contains("Usage: crossmesh "), "{command:?}");
    }
    let explain = ok(&["help", "explain"]).stdout;
    let above = explain.lines().take_while(|line| !line.trim_start().starts_with("--flight"));
    let heading = above.filter(|line| line.ends_with(':') && !line.starts_with(' ')).last();
    assert_eq!(heading, Some("Failed runs:"), "a flag stands under what it belongs to\n{explain}");
    assert!(refused(&["help", "explains"]).contains("explains"));
}

/// What `plan` says of a file it wrote, for programs; the file is the plan.
#[test]
fn plan_says_what_it_wrote_in_json() {
    let scratch = Scratch::new();
    let path = scratch.at("plan.json");
    let said = ok(&["plan", SRC, DST, "-o", &path, "--json"]).json();
    let doc: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((&said["schema"], &said["file"]), (&"crossmesh.planned/1".into(), &path.as_str().into()));
    assert_eq!((&said["predicted_s"], &said["bytes"]), (&doc["predicted_s"], &doc["bytes"]));
    assert_eq!(said["transfers"], doc["transfers"].as_array().unwrap().len());
    // To stdout, the plan is the answer.
    assert_eq!(ok(&["plan", SRC, DST, "--json"]).json(), doc);
}

/// 64 devices on one host is nobody's machine: every place that shows times says what was assumed.
#[test]
fn assumed_hosts_are_said_everywhere() {
    let scratch = Scratch::new();
    let (src, dst) = ("f32[64,8]@T{fsdp:64}(fsdp,_)", "f32[64,8]@I{tp:4}(_,tp)");
    let (plan, page) = (scratch.at("plan.json"), scratch.at("page.html"));
    let words = "one host of 64 devices is assumed, the length of a mesh's last axis";
    assert!(ok(&["explain", src, dst, "--html", &page]).stdout.contains(words));
    assert!(std::fs::read_to_string(&page).unwrap().contains("one host of 64 devices is assumed"));
    assert!(ok(&["plan", src, dst, "-o", &plan]).stdout.contains(words));
    let told = |args: &[&str]| ok(args).json()["assumed"].as_str().unwrap_or_default().to_string();
    assert!(told(&["explain", src, dst, "--json"]).contains(words));
    assert!(told(&["plan", src, dst, "-o", &plan, "--json"]).contains(words));
    let (small, wide) = ("f32[17]@T{x:17}(x)", "f32[17]@I{y:1}(_)");
    assert!(ok(&["run", small, wide]).stdout.contains("one host of 17 devices is assumed"));
    assert!(told(&["run", small, wide, "--json"]).contains("one host of 17 devices is assumed"));
    // Several NICs are of hosts of eight, and that is said as well; a host that was asked for is not assumed.
    let several = ok(&["explain", src, dst, "--nics", "8"]).stdout;
    assert!(
        several.contains("hosts of 8 devices are assumed") && several.contains("on 9 hosts"),
        "{several}"
    );
    let asked = ok(&["explain", src, dst, "--devices-per-host", "32"]).stdout;
    assert!(!asked.contains("assumed") && asked.contains("on 3 hosts"), "{asked}");
    // A model's hosts have eight devices; only what was not given is assumed.
    let model = scratch.at("model.json");
    let config = r#"{"model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 50}"#;
    std::fs::write(&model, config).unwrap();
    let of_model = ["--model", &model, "--src", "fsdp 16", "--dst", "tp 2"];
    let said =
        |command: &[&str], flags: &[&str]| ok(&[command, &of_model, flags, &["--json"]].concat()).json();
    let nics = ["--nics", "8", "--nic", "400Gbit"];
    for (flags, words) in [
        (
            &[][..],
            "hosts of 8 devices with one 10 Gbit/s NIC each are assumed; --devices-per-host, --nics, --nic or --cluster",
        ),
        (
            &nics[..2],
            "hosts of 8 devices with NICs of 10 Gbit/s are assumed; --devices-per-host, --nic or --cluster",
        ),
        (
            &nics[2..],
            "hosts of 8 devices with one NIC each are assumed; --devices-per-host, --nics or --cluster",
        ),
        (&nics, "hosts of 8 devices are assumed; --devices-per-host or --cluster"),
        (
            &["--devices-per-host", "4"],
            "hosts with one 10 Gbit/s NIC each are assumed; --nics, --nic or --cluster",
        ),
    ] {
        let answer = said(&["explain"], flags);
        let assumed = answer["assumed"].as_str().unwrap_or_default();
        assert!(assumed.starts_with(words) && assumed.ends_with(" say otherwise"), "{flags:?}: {assumed}");
        assert_eq!(said(&["plan", "-o", &plan], flags)["assumed"], answer["assumed"]);
    }
    let all = said(&["explain"], &[&nics[..], &["--devices-per-host", "8"]].concat());
    assert_eq!(all["assumed"], serde_json::Value::Null);
}

/// Tensors that the source has apart, inside of what the destination has in one: planned, proven, and run with every element checked.
#[test]
fn a_model_goes_unfused_into_fused_parameters() {
    let scratch = Scratch::new();
    let (model, plan) = (scratch.at("model.json"), scratch.at("plan.json"));
    let config = r#"{"model_type": "llama", "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 50}"#;
    std::fs::write(&model, config).unwrap();
    let of_model = ["--model", &model, "--src", "fsdp 4", "--dst", "tp 2", "--devices-per-host", "4"];
    ok(&[&["plan"], &of_model[..], &["--dst-fused", "-o", &plan]].concat());
    let text = std::fs::read_to_string(&plan).unwrap();
    assert!(text.contains("self_attn.q_proj.weight") && !text.contains("qkv_proj"), "{text}");
    assert!(text.contains(" at 288"), "k of the first device lies behind its half of q");
    ok(&["verify", &plan]);
    ok(&["run", &plan]);
    let both = refused(&[&["plan"], &of_model[..], &["--fused", "--dst-fused", "-o", &plan]].concat());
    assert!(both.contains("--dst-fused"), "{both}");
}

#[test]
fn shells_get_completions() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        assert!(ok(&["completions", shell]).stdout.contains("crossmesh"), "{shell}");
    }
}

/// `crossmesh … | head -1`: the reader goes away, and nobody minds.
#[test]
fn a_closed_pipe_is_no_error() {
    use std::process::Stdio;
    for args in [&["bench", "reshard", "--predict"][..], &["completions", "bash"], &["--help"]] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let out =
            binary().args(args).stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&out.stderr), "", "{args:?}");
        assert_eq!(out.status.code(), Some(0), "{args:?}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_error() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let out = binary()
        .args(["explain", SRC, DST])
        .stdout(full)
        .stderr(std::process::Stdio::piped())
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).starts_with("error: cannot write to stdout"));
}

#[test]
fn version_is_printed() {
    assert!(said(binary().arg("--version")).stdout.starts_with("crossmesh 0."));
}

#[test]
fn a_whole_model_is_planned_by_name() {
    let model = ["explain", "--model", "llama3-8b", "--src", "fsdp 4", "--dst", "dp 2, tp 2", "--fused"];
    let said = ok(&model);
    assert!(said.stdout.contains("reshard 195 tensors"), "{}", said.stdout);
    assert!(said.stdout.contains("tp of 14336+14336"), "{}", said.stdout);
    let stderr = refused(&["explain", "--model", "llama3-9b", "--src", "fsdp 4", "--dst", "tp 2"]);
    assert!(stderr.contains("llama3-8b"), "{stderr}");
}

/// Llama-3-70B from 64 trainers to 32 servers: every tensor, its plan proven, small on disk, and a page that says what takes longest. How
/// long it takes is in bench/results: a busy machine would fail a limit.
#[test]
fn the_largest_model_of_the_guide_is_planned_whole() {
    let scratch = Scratch::new();
    let model = ["--model", "llama3-70b", "--src", "fsdp 64", "--dst", "dp 4, tp 8"];
    let (plan, page) = (scratch.at("plan.json.gz"), scratch.at("page.html"));
    ok(&[&["plan"][..], &model, &["-o", &plan]].concat());
    assert!(std::fs::metadata(&plan).unwrap().len() <= 15_000_000, "compact on disk");
    assert!(ok(&["verify", &plan]).stdout.contains("every element arrives exactly once"));
    let said = ok(&[&["explain"][..], &model, &["--html", &page]].concat()).stdout;
    assert!(said.starts_with("reshard 723 tensors, 131 GiB "), "{said}");
    let longest = said.lines().find_map(|line| line.trim().split_once(" takes longest: ")).unwrap().0;
    assert!(
        said.lines().any(|line| line.starts_with(&format!("  {longest}  "))),
        "it is in the table: {said}"
    );
    let page = std::fs::read_to_string(&page).unwrap();
    assert!(page.len() < 1_000_000 && page.contains(&format!("<td>{longest}</td>")), "{}", page.len());
}
