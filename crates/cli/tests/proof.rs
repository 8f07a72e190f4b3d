//! Plans written by hand that once passed and ran wrong, or were right and refused; and programs as documents.

mod common;

use common::{Scratch, crossmesh, ok, refused};
use crossmesh_testkit::machine::needs_root;
use serde_json::{Value, json};

/// A transfer: source, destination, the elements of one dim, `after`, and whether it is combined with what is there.
type Transfer<'a> = (u32, u32, [u64; 2], &'a [u32], bool);

/// A plan document for these transfers, written to a file.
fn by_hand(scratch: &Scratch, name: &str, src: &str, dst: &str, peak: u64, transfers: &[Transfer]) -> String {
    let mut doc: Value = ok(&["explain", src, dst, "--format", "json"]).json();
    let element = match src.split('[').next().unwrap() {
        "u8" => 1,
        _ => 4,
    };
    let host = |rank: u32| doc["devices"][rank as usize]["host"].clone();
    let listed: Vec<Value> = (0..)
        .zip(transfers)
        .map(|(id, (from, to, region, after, reduce)): (u32, _)| {
            let link = if host(*from) == host(*to) { "local" } else { "nic" };
            let bytes = (region[1] - region[0]) * element;
            let mut t = json!({"id": id, "src": from, "dst": to, "region": [region], "bytes": bytes, "link": link, "after": after});
            if *reduce {
                t["reduce"] = "sum".into();
            }
            t
        })
        .collect();
    doc["bytes"] = listed.iter().map(|t| t["bytes"].as_u64().unwrap()).sum::<u64>().into();
    (doc["lower_bound_s"], doc["predicted_s"], doc["peak_extra_bytes"]) = (0.into(), 0.into(), peak.into());
    doc["transfers"] = listed.into();
    let path = scratch.at(name);
    std::fs::write(&path, doc.to_string()).unwrap();
    path
}

/// Proven, and right when it runs.
fn runs_right(path: &str) {
    ok(&["verify", path]);
    let report = ok(&["run", path, "--repeat", "3", "--format", "json"]).json();
    assert_eq!(report["verified"], true, "{path}");
}

/// Refused by `verify` with this law and these words, and not started by `run`.
fn is_refused(path: &str, law: &str, words: &[&str]) {
    let said = crossmesh(&["verify", path]);
    assert_eq!(said.code, 1, "{}", said.stdout);
    assert!(said.stdout.contains(&format!(": {law}: ")), "{}", said.stdout);
    for word in words {
        assert!(said.stdout.contains(word), "{} does not say {word}", said.stdout);
    }
    let run = refused(&["run", path]);
    assert!(run.contains("breaks a law") && run.contains(law), "{run}");
}

#[test]
fn a_box_is_sent_out_of_a_larger_one_in_transit() {
    let scratch = Scratch::new();
    let (n, half) = (1u64 << 20, 1u64 << 19);
    let (src, dst) = (format!("u8[{n}]@A{{x:1}}(_)"), format!("u8[{n}]@B{{y:2,x:2}}(x)"));
    let transfers: [Transfer; 5] = [
        (0, 1, [0, n], &[], false),
        (1, 3, [0, half], &[0], false),
        (0, 1, [0, half], &[], false),
        (0, 2, [half, n], &[], false),
        (0, 4, [half, n], &[], false),
    ];
    runs_right(&by_hand(&scratch, "transit.json", &src, &dst, n, &transfers));
}

#[test]
fn a_box_is_put_together_from_two_staged_ones() {
    let scratch = Scratch::new();
    let transfers: [Transfer; 4] = [
        (0, 1, [0, 1], &[], false),
        (0, 1, [1, 2], &[], false),
        (1, 2, [0, 2], &[0, 1], false),
        (1, 2, [2, 4], &[], false),
    ];
    runs_right(&by_hand(&scratch, "two.json", "f32[4]@A{x:2}(x)", "f32[4]@B{y:1}(_)", 64, &transfers));
}

#[test]
fn a_part_of_a_sum_counts_once_where_after_points_forward() {
    let scratch = Scratch::new();
    let (src, dst) = ("f32[4]@A{d:2}(_ | sum d)", "f32[4]@B{x:2}(_)");
    let twice: [Transfer; 4] = [
        (0, 3, [0, 4], &[3, 1], false),
        (1, 0, [0, 4], &[], true),
        (1, 2, [0, 4], &[], false),
        (0, 2, [0, 4], &[1], true),
    ];
    let path = by_hand(&scratch, "twice.json", src, dst, 64, &twice);
    is_refused(&path, "coverage", &["part 1", "a second time", "t3"]);
    let right: [Transfer; 4] = [
        (0, 3, [0, 4], &[3], false),
        (1, 3, [0, 4], &[], true),
        (1, 2, [0, 4], &[], false),
        (0, 2, [0, 4], &[], true),
    ];
    runs_right(&by_hand(&scratch, "once.json", src, dst, 64, &right));
}

#[test]
fn an_order_through_a_sender_alone_is_a_race() {
    let scratch = Scratch::new();
    // r2 gets r0's part, and later the whole sum over it; that r0 has sent does not say that r2 has received.
    let transfers: [Transfer; 3] = [
        (0, 2, [0, 131_073], &[], false),
        (0, 1, [0, 131_073], &[0], true),
        (1, 2, [0, 131_073], &[1], false),
    ];
    let (src, dst) = ("f32[131073]@A{d:2}(_ | sum d)", "f32[131073]@B{x:1}(_)");
    let path = by_hand(&scratch, "race.json", src, dst, 1 << 20, &transfers);
    is_refused(&path, "race", &["the receive of t2 on r2 from r1", "the receive of t0 on r2 from r0"]);
    // The same box by box, over six transfers, of which one lacks the order at r2; and with it.
    let both = |last: &'static [u32]| -> [Transfer<'static>; 6] {
        [
            (0, 2, [0, 65_537], &[], false),
            (0, 2, [65_537, 131_073], &[], false),
            (0, 1, [0, 65_537], &[0], true),
            (0, 1, [65_537, 131_073], &[1], true),
            (1, 2, [0, 65_537], &[2, 0], false),
            (1, 2, [65_537, 131_073], last, false),
        ]
    };
    let path = by_hand(&scratch, "six.json", src, dst, 1 << 20, &both(&[3]));
    is_refused(&path, "race", &["the receive of t5 on r2 from r1", "the receive of t1 on r2 from r0"]);
    runs_right(&by_hand(&scratch, "ordered.json", src, dst, 1 << 20, &both(&[3, 1])));
}

#[test]
fn what_is_planned_under_a_limit_runs() {
    let (src, dst) = ("f32[32,32]@A{h:4}(_,_ | sum h)", "f32[32,32]@B{x:1}(_,_)");
    let flags = ["--devices-per-host", "2", "--max-extra-bytes", "1000", "--format", "json"];
    assert_eq!(ok(&[&["run", src, dst][..], &flags].concat()).json()["verified"], true);
    for dtype in ["f8e4m3", "f8e5m2", "bool", "i8"] {
        for op in ["sum", "max", "min"] {
            let src = format!("{dtype}[33]@A{{h:3}}(_ | {op} h)");
            let dst = format!("{dtype}[33]@B{{x:2}}(x)");
            assert_eq!(ok(&["run", &src, &dst, "--format", "json"]).json()["verified"], true, "{src}");
        }
    }
}

#[test]
fn a_rank_of_no_mesh_passes_something_on() {
    let scratch = Scratch::new();
    let cluster = scratch.at("cluster.toml");
    std::fs::write(&cluster, "[[host]]\ndevices = 1\ncount = 3\nnic = \"10Gbit\"\n").unwrap();
    let plan = scratch.at("plan.json");
    let (src, dst) = ("f32[4]@A{x:1}=0(_)", "f32[4]@B{x:1}=1(_)");
    ok(&["plan", src, dst, "--cluster", &cluster, "-o", &plan]);
    let mut doc: Value = serde_json::from_str(&std::fs::read_to_string(&plan).unwrap()).unwrap();
    let hop = |id: u32, from: u32, to: u32, after: &[u32]| json!({"id": id, "src": from, "dst": to, "region": [[0, 4]], "bytes": 16, "link": "nic", "after": after});
    doc["transfers"] = json!([hop(0, 0, 2, &[]), hop(1, 2, 1, &[0])]);
    (doc["bytes"], doc["peak_extra_bytes"], doc["predicted_s"]) = (32.into(), 16.into(), 0.into());
    std::fs::write(&plan, doc.to_string()).unwrap();
    runs_right(&plan);
}

#[test]
fn figures_beside_a_plan_are_held_against_it() {
    let scratch = Scratch::new();
    let plan = scratch.at("plan.json");
    ok(&["plan", "f32[800]@A{tp:2}(tp)", "f32[800]@B{tp:3}(_)", "-o", &plan]);
    ok(&["verify", &plan]);
    let good: Value = serde_json::from_str(&std::fs::read_to_string(&plan).unwrap()).unwrap();
    for (field, factor) in [("lower_bound_s", 1.5), ("lower_bound_s", 0.5), ("predicted_s", 0.9)] {
        let mut lie = good.clone();
        lie[field] = (good[field].as_f64().unwrap() * factor).into();
        let path = scratch.at("lie.json");
        std::fs::write(&path, lie.to_string()).unwrap();
        is_refused(&path, "claims", &["are claimed"]);
    }
}

#[test]
fn programs_are_documents() {
    let scratch = Scratch::new();
    let (src, dst) = ("f32[8,6]@A{tp:2}(tp,_)", "f32[8,6]@B{tp:3}(_,tp)");
    let text = ok(&["explain", src, dst, "--program"]).stdout;
    assert!(text.contains("op 0  send t0 to r2") && text.contains("a goal"), "{text}");
    let doc = ok(&["explain", src, dst, "--program", "--format", "json"]).stdout;
    let path = scratch.at("program.json");
    std::fs::write(&path, &doc).unwrap();
    let proven = ok(&["verify", &path]).stdout;
    assert!(proven.contains("192 B in 6 messages"), "{proven}");
    assert!(ok(&["simulate", &path]).stdout.contains("predicted    154 ns"));
    assert_eq!(ok(&["run", &path, "--format", "json"]).json()["verified"], true);

    let bad = |name: &str, edit: &dyn Fn(&mut Value)| {
        let mut doc: Value = serde_json::from_str(&doc).unwrap();
        edit(&mut doc);
        let path = scratch.at(name);
        std::fs::write(&path, doc.to_string()).unwrap();
        path
    };
    type Case<'a> = (&'a str, &'a str, &'a dyn Fn(&mut Value));
    let cases: [Case; 5] = [
        ("buffer.json", "names buffer 77", &|d| d["ranks"][0]["tiles"][0]["buffer"] = 77.into()),
        ("box.json", "[0:900, 0:6]", &|d| d["boxes"][0] = json!([[0, 900], [0, 6]])),
        ("cycle.json", "wait for each other", &|d| d["ranks"][0]["ops"][0]["after"] = json!([0])),
        ("size.json", "more bytes", &|d| d["tensors"][0]["shape"] = json!([u64::MAX, 6])),
        ("bytes.json", "is stated as", &|d| d["ranks"][0]["ops"][0]["bytes"] = u64::MAX.into()),
    ];
    for (name, words, edit) in cases {
        let path = bad(name, edit);
        let verdict = crossmesh(&["verify", &path]);
        assert_eq!(verdict.code, 1, "{name}: {}", verdict.stdout);
        let mut said = verdict.stdout;
        for command in ["run", "simulate"] {
            let error = refused(&[command, &path]);
            assert!(error.contains("breaks a law"), "{command} {name}: {error}");
            said += &error;
        }
        assert!(said.contains(words), "{name}: {said}");
    }
    // A cluster proves nothing, and yet what is proven is to run.
    let clusters: [Case; 2] = [
        ("few.json", "the program has 5 ranks, its cluster 0 devices\nhint: ", &|d| {
            d["cluster"]["hosts"] = json!([]);
        }),
        ("still.json", "local_bytes_per_s", &|d| d["cluster"]["hosts"][0]["local_bytes_per_s"] = 0.into()),
    ];
    for (name, words, edit) in clusters {
        let path = bad(name, edit);
        for command in ["verify", "simulate", "run"] {
            let error = refused(&[command, &path]);
            assert!(error.contains(words) && error.contains(name), "{command}: {error}");
        }
    }
    let newer = scratch.at("newer.json");
    std::fs::write(&newer, doc.replace("crossmesh.program/1", "crossmesh.program/9")).unwrap();
    // 2^64 is one more than any size can be.
    let huge = scratch.at("huge.json");
    std::fs::write(
        &huge,
        doc.replacen("\"shape\": [8", "\"shape\": [18446744073709551616", 1).replacen(
            "\"shape\":[8",
            "\"shape\":[18446744073709551616",
            1,
        ),
    )
    .unwrap();
    for command in ["verify", "simulate", "run"] {
        assert!(refused(&[command, &newer]).contains("newer"), "{command}");
        let error = refused(&[command, &huge]);
        assert!(
            error.contains("not a program document") && error.contains("huge.json"),
            "{command}: {error}"
        );
    }
    let cut = scratch.at("cut.json");
    std::fs::write(&cut, &doc[..doc.len() / 2]).unwrap();
    for command in ["verify", "simulate", "run"] {
        assert!(refused(&[command, &cut]).contains("not a program document"), "{command}");
    }
}

/// The race of three ranks, with a slow NIC at r0: refused, so that nothing goes wrong.
#[test]
fn emulation_starts_no_race() {
    needs_root();
    let scratch = Scratch::new();
    let transfers: [Transfer; 3] = [
        (0, 2, [0, 131_073], &[], false),
        (0, 1, [0, 131_073], &[0], true),
        (1, 2, [0, 131_073], &[1], false),
    ];
    let (src, dst) = ("f32[131073]@A{d:2}(_ | sum d)", "f32[131073]@B{x:1}(_)");
    let path = by_hand(&scratch, "race.json", src, dst, 1 << 20, &transfers);
    assert!(refused(&["run", &path, "--emulate", "1Gbit,h0=10Mbit"]).contains("race"));
}
