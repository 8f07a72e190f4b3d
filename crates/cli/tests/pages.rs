//! Report pages as a browser shows them, in windows of 1300 and 700 pixels, light and dark: nothing scrolls sideways, is cut off, lies on
//! other text, is smaller than 9 pixels, or too pale to read.
//!
//! It needs Chromium, which a machine without a screen rarely has: it runs when asked for,
//! `cargo test -p crossmesh-cli --test pages -- --ignored --nocapture`.

mod common;
mod tiny;

use std::path::Path;
use std::process::{Command, Stdio};

use common::{Scratch, ok};
use serde_json::Value;
use tiny::{Run, trained};

const CHECK: &str = include_str!("pages/check.js");
const WIDTHS: [u32; 2] = [1300, 700];

/// A page of every kind, by name.
fn pages(folder: &Path) -> Vec<(&'static str, String)> {
    let whole = ["--model", "llama3-70b", "--src", "fsdp 64", "--dst", "dp 4, tp 8"];
    let many = ["i32[64,64,64]@A{host:12,gpu:4}(_,host,_)", "i32[64,64,64]@B{host:11,gpu:4}(host,_,_)"];
    let zbv = ["schedule", "zbv", "--stages", "4", "--microbatches", "8", "--comm=0.25"];
    let commands: [(&str, Vec<&str>); 6] = [
        ("plan", [&["explain"], &whole[..]].concat()),
        ("hosts", [&["explain"], &many[..]].concat()),
        ("bench", vec!["bench", "reshard", "--predict"]),
        ("schedule", zbv.to_vec()),
        ("compare", vec!["schedule", "compare", "--stages", "8", "--microbatches", "16"]),
        ("pipeline", vec!["bench", "pipeline", "--predict", "--case", "GPT"]),
    ];
    let mut pages = vec![];
    for (name, words) in commands {
        let file = folder.join(format!("{name}.html"));
        ok(&[&words[..], &["--html", file.to_str().unwrap()]].concat());
        pages.push((name, std::fs::read_to_string(file).unwrap()));
    }
    let run = Run::new();
    trained(&run.train(&[]));
    pages.push(("train", std::fs::read_to_string(run.scratch.path().join("runs/tiny/report.html")).unwrap()));
    pages
}

/// What is wrong with the pages in this light, and what was looked at.
fn looked_at(pages: &[(&str, String)], folder: &Path, dark: bool) -> Value {
    let plain = |value: Value| value.to_string().replace('<', "\\u003c");
    let pages = plain(pages.iter().map(|(name, html)| Value::from(vec![*name, html])).collect());
    let harness = folder.join(if dark { "dark.html" } else { "light.html" });
    let html = format!(
        "<!doctype html><meta charset=\"utf-8\"><style>:root {{ color-scheme: light dark }}</style><body><script>\n\
         const PAGES = {pages}, WIDTHS = {WIDTHS:?};\n{CHECK}</script></body>"
    );
    std::fs::write(&harness, html).unwrap();
    let flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking \
                 --disable-component-update --disable-sync --hide-scrollbars --dump-dom --virtual-time-budget=60000";
    let out = Command::new("chromium")
        .args(flags.split_whitespace())
        .arg(format!("--blink-settings=preferredColorScheme={}", if dark { 0 } else { 1 }))
        .arg(format!("--user-data-dir={}", folder.join(format!("profile-{dark}")).display()))
        .arg(format!("file://{}", harness.display()))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let dom = String::from_utf8_lossy(&out.stdout);
    let result = dom.rsplit_once("<pre id=\"result\">").and_then(|(_, rest)| rest.split_once("</pre>"));
    let (result, _) = result.unwrap_or_else(|| panic!("no result: {}", String::from_utf8_lossy(&out.stderr)));
    let text = result.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
}

#[test]
#[ignore = "needs chromium"]
fn pages_can_be_read_in_every_window_and_light() {
    if Command::new("chromium").arg("--version").output().is_err() {
        eprintln!("SKIPPED: chromium is not installed, and no page was looked at");
        return;
    }
    let scratch = Scratch::new();
    let pages = pages(scratch.path());
    let mut wrong = vec![];
    for dark in [false, true] {
        let result = looked_at(&pages, scratch.path(), dark);
        let seen = &result["seen"];
        eprintln!("{}: {seen}", if dark { "dark" } else { "light" });
        assert_eq!(seen["dark"], dark, "the browser does not show pages in this light");
        assert_eq!(seen["frames"], pages.len() * WIDTHS.len());
        assert!(seen["svgs"].as_u64() > Some(20) && seen["texts"].as_u64() > Some(500), "{seen}");
        let found = result["found"].as_array().unwrap().iter();
        wrong.extend(
            found.map(|line| format!("{}, {}", if dark { "dark" } else { "light" }, line.as_str().unwrap())),
        );
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The check sees what it is for.
#[test]
#[ignore = "needs chromium"]
fn a_page_that_cannot_be_read_is_found() {
    if Command::new("chromium").arg("--version").output().is_err() {
        eprintln!("SKIPPED: chromium is not installed, and no page was looked at");
        return;
    }
    let scratch = Scratch::new();
    let svg = |body: &str| {
        format!("<body><svg width=\"400\" height=\"40\" viewBox=\"0 0 400 40\">{body}</svg></body>")
    };
    let bad = [
        ("wide", "<body><div style=\"width: 2000px\">a</div></body>".to_string(), "scrolls sideways"),
        ("cut", svg("<text x=\"390\" y=\"20\">a long label</text>"), "is cut off"),
        ("small", svg("<text x=\"10\" y=\"20\" font-size=\"7\">a</text>"), "has 7.0 px"),
        (
            "pale",
            svg(
                "<rect width=\"400\" height=\"40\" fill=\"#eee\"/><text x=\"10\" y=\"20\" fill=\"#ccc\">a</text>",
            ),
            "contrast",
        ),
        (
            "both",
            svg("<text x=\"10\" y=\"20\">one</text><text x=\"12\" y=\"20\">two</text>"),
            "on top of each other",
        ),
    ];
    let pages: Vec<(&str, String)> = bad.iter().map(|(name, html, _)| (*name, html.clone())).collect();
    let found = looked_at(&pages, scratch.path(), false)["found"].to_string();
    for (name, _, words) in bad {
        assert!(found.contains(&format!("{name} at 700 px")) && found.contains(words), "{name}: {found}");
    }
}
