//! Wrong input: a clear error, exit 2, no panic.

mod common;

use common::{Scratch, crossmesh, ok, refused};
use serde_json::Value;

const SRC: &str = "f32[8,6]@A{tp:2}(tp,_)";
const DST: &str = "f32[8,6]@B{tp:3}(_,tp)";

fn explain_refused(src: &str, dst: &str) -> String {
    refused(&["explain", src, dst])
}

#[test]
fn an_axis_twice_is_pointed_at() {
    let stderr = explain_refused("f32[8,6]@A{tp:2}(tp,tp)", DST);
    assert_eq!(
        stderr,
        "error: layout splits two dims over the same axis `tp`\n  f32[8,6]@A{tp:2}(tp,tp)\n                  ^^^^^^^\n\
         hint: an axis splits one dim at most; name another axis, or `_` to leave a dim whole\n"
    );
}

#[test]
fn layouts_that_make_no_sense() {
    for (src, why) in [
        ("f32[8,6]@A{tp:2}(dp,_)", "no axis `dp`"),
        ("f32[8,6]@A{tp:2}(tp)", "dims"),
        ("f33[8,6]@A{tp:2}(tp,_)", "unknown dtype"),
        ("f32[99999999999999999999]@A{tp:2}(tp)", "64 bits"),
        ("f32[4294967296,4294967296,4294967296]@A{tp:2}(tp,_,_)", "2^64"),
        ("f32[8,6]@A{tp:2}=0,0(tp,_)", "listed twice"),
        ("f32[8,6]@A{tp:2}=0-5(tp,_)", "ranks are listed"),
        ("f32[8,6]@A{tp:0}(tp,_)", "length 0"),
        ("f32[8,6]@A{tp:4294967295,dp:4294967295}(tp,_)", "devices"),
        ("f32[1,1,1,1,1,1,1,1,1]@A{tp:2}(_,_,_,_,_,_,_,_,_)", "more than 8"),
        ("", "expected"),
        ("f32[8,6]@A{tp:2}(tp,_)x", "expected"),
        ("f32[8,6]@Ä{tp:2}(tp,_)", "expected"),
    ] {
        let stderr = explain_refused(src, DST);
        assert!(stderr.contains(why), "{src}: {stderr}");
    }
}

#[test]
fn pairs_that_do_not_fit() {
    for (dst, why) in [
        ("f32[8,7]@B{tp:3}(_,tp)", "differ in shape"),
        ("f16[8,6]@B{tp:3}(_,tp)", "differ in dtype"),
        ("f32[8,6]@B{tp:3}(_,_ | sum tp)", "whole values are one part, 3 are wanted"),
        ("f32[8,6]@A{tp:3}(_,tp)", "given twice"),
        ("f32[8,6]@B{tp:3}=90-92(_,tp)", "without a device"),
    ] {
        let stderr = explain_refused(SRC, dst);
        assert!(stderr.contains(why), "{dst}: {stderr}");
    }
}

#[test]
fn a_name_twice() {
    let scratch = Scratch::new();
    let line = "w: f32[8]@A{tp:2}(tp) -> f32[8]@B{tp:2}(_)\n";
    let path = scratch.file("pairs.txt", line.repeat(2));
    let stderr = refused(&["explain", "--pairs", path.to_str().unwrap()]);
    assert!(stderr.contains("names `w` twice"), "{stderr}");
}

/// Each size fits into 64 bits; their sums would not.
#[test]
fn tensors_too_large_to_add_up() {
    for (src, dst) in [
        ("u8[18446744073709551615]@A{tp:2}(tp)", "u8[18446744073709551615]@B{tp:3}(tp)"),
        ("u8[9223372036854775808]@A{tp:1}(_)", "u8[9223372036854775808]@B{h:4,tp:2}(_)"),
        ("u8[1152921504606846976]@A{tp:2}(tp)", "u8[1152921504606846976]@B{tp:3}(tp)"),
    ] {
        let stderr = explain_refused(src, dst);
        assert!(stderr.contains("bytes over all devices"), "{stderr}");
    }
}

#[test]
fn options_that_make_no_sense() {
    for (option, value, why) in [
        ("--nic", "NaN", "not a rate"),
        ("--nic", "inf", "not a rate"),
        ("--nic", "0", "rate"),
        ("--nic", "0Gbit", "nothing would ever arrive"),
        ("--nic", "-1Gbit", "negative"),
        ("--nic", "10Gb/s", "bits or bytes"),
        ("--nic", "10", "no unit"),
        ("--nic", "1Gbit,2Gbit", "`2Gbit` names no host"),
        ("--nic", "1Gbit,h2=2Gbit", "there is no host h2"),
        ("--nic", "1Gbit,two=2Gbit", "`two` is no host"),
        ("--local", "fast", "not a rate"),
        ("--latency", "NaN", "not a time"),
        ("--latency", "3 fortnights", "not a time"),
        ("--chunk", "0", "chunk"),
        ("--chunk", "lots", "not a number of bytes"),
        ("--chunk", "99999999999999999999", "too large"),
        ("--max-extra-bytes", "-1", "negative"),
        ("--strategy", "magic", "unknown strategy"),
        ("--devices-per-host", "0", "0"),
        ("--nics", "0", "0"),
        ("--seed", "minus one", "invalid"),
        ("--format", "xml", "xml"),
        ("--bogus", "1", "--bogus"),
    ] {
        let stderr = refused(&["explain", SRC, DST, option, value]);
        assert!(stderr.contains(why), "{option} {value}: {stderr}");
    }
}

#[test]
fn a_mesh_larger_than_the_cluster() {
    let scratch = Scratch::new();
    let cluster = scratch.file("c.toml", "[[host]]\ndevices = 4\n");
    let stderr = refused(&["explain", SRC, DST, "--cluster", cluster.to_str().unwrap()]);
    assert!(stderr.contains("the cluster has 4 devices"), "{stderr}");
}

#[test]
fn cluster_files_that_make_no_sense() {
    let scratch = Scratch::new();
    for text in [
        "",
        "[[host]",
        "[[host]]\ndevices = 0",
        "[[host]]\ndevices = -3",
        "[[host]]\ndevices = 99999999999999999999",
        "[[host]]\ndevices = 4\nnic = 'NaN'",
        "[[host]]\ndevices = 4\nnic = nan",
        "[[host]]\ndevices = 4\nnics = 0",
        "[[host]]\ncount = 4000000000\ndevices = 4000000000",
        "[[host]]\ndevices = 4\ndevises = 4",
        "[[host]]\ndevices = 4\n[[tier]]\nhosts_per_group = 0\noversubscription = 2.0",
        "[[host]]\ndevices = 4\n[[tier]]\nhosts_per_group = 1\noversubscription = nan",
    ] {
        let path = scratch.file("c.toml", text);
        let stderr = refused(&["explain", SRC, DST, "--cluster", path.to_str().unwrap()]);
        assert!(stderr.contains("c.toml"), "{text}: {stderr}");
    }
}

#[test]
fn files_that_are_none() {
    let scratch = Scratch::new();
    let folder = scratch.path().to_str().unwrap().to_string();
    let missing = scratch.at("missing");
    let binary = scratch.file("binary", [0xff, 0xfe, 0x00, 0x80]);
    let binary = binary.to_str().unwrap();
    for (path, why) in
        [(folder.as_str(), "it is a directory"), (&missing, "cannot read"), (binary, "not UTF-8")]
    {
        for args in [
            &["explain", path][..],
            &["explain", "--pairs", path],
            &["explain", SRC, DST, "--cluster", path],
            &["verify", path],
            &["simulate", path],
            &["diff", path, path],
        ] {
            let stderr = refused(args);
            assert!(stderr.contains(why) && stderr.contains(path), "{args:?}: {stderr}");
            assert!(path != missing || stderr.contains("\nhint: "), "{args:?}: {stderr}");
        }
    }
    for args in [&["train", &missing][..], &["generate", &missing], &["checkpoint", "show", &missing]] {
        let stderr = refused(args);
        assert!(stderr.contains(&missing) && stderr.contains("\nhint: "), "{args:?}: {stderr}");
    }
    assert!(refused(&["verify", "/dev/zero"]).contains("it is a device\nhint: "));
    assert!(refused(&["bench", "reshard", "--predict", "--suite", &folder]).contains("it is a directory"));
    assert!(refused(&["bench", "reshard", "--predict", "--suite", &missing]).contains("no suite"));
}

#[test]
fn places_that_cannot_be_written() {
    let scratch = Scratch::new();
    let (folder, nowhere) = (scratch.path().to_str().unwrap().to_string(), scratch.at("no/such/folder/x"));
    for path in [&folder, &nowhere] {
        assert!(refused(&["plan", SRC, DST, "-o", path]).contains("cannot write"));
        assert!(refused(&["explain", SRC, DST, "--html", path]).contains("cannot write"));
    }
}

#[test]
fn plan_documents_that_make_no_sense() {
    let scratch = Scratch::new();
    let text = ok(&["explain", SRC, DST, "--format", "json"]).stdout;
    let with = |change: &dyn Fn(&mut Value)| {
        let mut doc: Value = serde_json::from_str(&text).unwrap();
        change(&mut doc);
        doc.to_string()
    };
    for (text, why) in [
        (String::new(), "not a plan document"),
        ("{".into(), "not a plan document"),
        ("[]".into(), "not a plan document"),
        ("{}".into(), "not a plan document"),
        ("null".into(), "not a plan document"),
        (text[..text.len() / 2].to_string(), "not a plan document"),
        ("[".repeat(200_000), "not a plan document"),
        (with(&|d| d["schema"] = "crossmesh.plan/2".into()), "newer"),
        (with(&|d| d["schema"] = "crossmesh.plan/99999999999999999999999".into()), "schema"),
        (with(&|d| d["schema"] = "something.else/1".into()), "unknown schema"),
        (with(&|d| d["transfers"] = Value::Null), "not a plan document"),
        (with(&|d| d["cluster"]["hosts"][0]["nic_out_bytes_per_s"] = 0.into()), "cluster"),
        (with(&|d| d["cluster"]["hosts"][0]["devices"] = 4_000_000_000u64.into()), "cluster"),
        (with(&|d| d["cluster"]["hosts"] = Value::Array(vec![])), "the cluster has 0 devices"),
        (with(&|d| d["predicted_s"] = (-1.0).into()), "predicted_s"),
    ] {
        let path = scratch.file("plan.json", &text);
        let path = path.to_str().unwrap();
        for args in [&["verify", path][..], &["simulate", path], &["diff", path, path]] {
            let stderr = refused(args);
            assert!(stderr.contains(why) && stderr.contains("plan.json"), "{args:?}: {stderr}");
        }
    }
}

type Change<'a> = &'a dyn Fn(&mut Value);

/// Readable, but wrong: the answer is no, not a failure.
#[test]
fn wrong_plans_are_answered_no() {
    let scratch = Scratch::new();
    let text = ok(&["explain", SRC, DST, "--format", "json"]).stdout;
    let changes: [(Change, &str); 5] = [
        (&|d| d["transfers"][0]["after"] = serde_json::json!([77]), "causality"),
        (&|d| d["transfers"][0]["src"] = 77.into(), "malformed"),
        (&|d| d["transfers"][0]["region"] = serde_json::json!([[0, 99], [0, 2]]), "malformed"),
        (&|d| d["transfers"][0]["src"] = 1.into(), "causality"),
        (
            &|d| {
                d["transfers"].as_array_mut().unwrap().remove(2);
            },
            "coverage",
        ),
    ];
    for (change, law) in changes {
        let mut doc: Value = serde_json::from_str(&text).unwrap();
        change(&mut doc);
        let path = scratch.file("plan.json", doc.to_string());
        let said = crossmesh(&["verify", path.to_str().unwrap()]);
        assert_eq!((said.code, said.stderr.as_str()), (1, ""), "{law}: {}", said.stdout);
        assert!(said.stdout.contains(law), "{law}: {}", said.stdout);
        let stderr = refused(&["simulate", path.to_str().unwrap()]);
        assert!(stderr.contains("plan.json"), "{stderr}");
    }
}

#[test]
fn pair_files_that_make_no_sense() {
    let scratch = Scratch::new();
    for (text, why) in [
        ("", "names no tensor"),
        ("# nothing\n", "names no tensor"),
        ("f32[8]@A{tp:2}(tp)\n", "line 1: no `->`"),
        ("\nx: f32[8]@A{tp:2}(tp) -> f32[9]@B{tp:2}(tp)\n", "differ in shape"),
        ("\nx: f32[8]@A{tp:2}(dp) -> f32[8]@B{tp:2}(tp)\n", "line 2: mesh `A` has no axis `dp`"),
    ] {
        let path = scratch.file("pairs.txt", text);
        let stderr = refused(&["explain", path.to_str().unwrap()]);
        assert!(stderr.contains(why), "{text}: {stderr}");
    }
}

#[test]
fn suites_that_make_no_sense() {
    let scratch = Scratch::new();
    let head = "schema = 'crossmesh.suite/1'\nname = 'x'\n";
    for (text, why) in [
        (String::new(), "schema"),
        ("schema = 'crossmesh.suite/2'\nname = 'x'\ncase = []".to_string(), "suite/2"),
        (format!("{head}case = []"), "no cases"),
        (format!("{head}[[case]]\nname = 'one'\n"), "`src` and `dst`"),
        (format!("{head}[[case]]\nname = 'one'\nsrc = 'x'\ndst = 'y'\n"), "case `one`"),
        (
            format!("{head}[hosts]\nnic = 'NaN'\n[[case]]\nname = 'one'\nsrc = '{SRC}'\ndst = '{DST}'\n"),
            "not a rate",
        ),
    ] {
        let path = scratch.file("suite.toml", &text);
        let stderr = refused(&["bench", "reshard", "--predict", "--suite", path.to_str().unwrap()]);
        assert!(stderr.contains(why), "{text}: {stderr}");
    }
    assert!(refused(&["bench", "reshard", "--predict", "--case", "nowhere"]).contains("nowhere"));
}

#[test]
fn tensors_that_cannot_shrink_are_not_measured() {
    let stderr = refused(&["bench", "reshard", "--case", "n-to-m 1", "--tensor-bytes", "1KiB"]);
    assert!(stderr.contains("cannot be shrunk to 1024 B"), "{stderr}");
    assert!(refused(&["bench", "reshard", "--strategies", "magic"]).contains("unknown strategy"));
}

/// No rank is to blame for what the build lacks: none is started.
#[cfg(not(feature = "cuda"))]
#[test]
fn gpu_memory_without_cuda_in_the_build() {
    let stderr = refused(&["run", SRC, DST, "--memory", "cuda"]);
    assert!(stderr.contains("this build has no CUDA\nhint: build it with `--features cuda`"), "{stderr}");
    assert!(!stderr.contains("failed"), "{stderr}");
    assert!(refused(&["run", SRC, DST, "--memory", "tpu"]).contains("`tpu` is no memory"));
}

#[test]
fn commands_that_do_not_exist() {
    refused(&["dance"]);
    refused(&["explain"]);
    refused(&["completions", "cmd.exe"]);
    assert!(refused(&["explain", SRC]).contains("the destination"));
}

#[cfg(unix)]
#[test]
fn arguments_that_are_not_text() {
    use std::os::unix::ffi::OsStrExt;
    let junk = std::ffi::OsStr::from_bytes(b"f32\xff[8]");
    refused(&["explain".as_ref(), junk, DST.as_ref()]);
}
