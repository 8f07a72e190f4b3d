//! The README and the first guide show commands and what they print. This runs them and compares.
//!
//! Blocks of ```` ```sh ```` are run by a shell, one behind the other in one folder, as a reader would type them. A block of output starts with ```` ```console ````, a command with `$ `; a line `…` stands for any lines. With `UPDATE_DOCS=1` the
//! blocks are written anew: as many lines as before in front of and behind the `…`, or all of them where there is none.

mod common;

use std::path::PathBuf;

use common::{Scratch, said, shell, shell_blocks};

const MAIN_JOB: &str = "cargo run --release -p crossmesh-cli --bin crossmesh -- ";

/// A command of the README and the lines shown under it.
struct Shown {
    command: String,
    lines: Vec<String>,
    /// Where the lines are, counted in lines of the file.
    at: std::ops::Range<usize>,
}

fn page(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(name)
}

fn shown(text: &str) -> Vec<Shown> {
    let mut found: Vec<Shown> = vec![];
    let mut inside = false;
    for (number, line) in text.lines().enumerate() {
        match line.strip_prefix("$ ") {
            _ if line.starts_with("```") => inside = line == "```console",
            Some(command) if inside => {
                found.push(Shown { command: command.into(), lines: vec![], at: number + 1..number + 1 });
            }
            _ if inside && !found.is_empty() => {
                let last = found.last_mut().expect("just seen");
                last.lines.push(line.into());
                last.at.end = number + 1;
            }
            _ => {}
        }
    }
    found
}

/// What the command prints, stdout and stderr, or nothing if it is not ours to run.
fn run(command: &str) -> Option<String> {
    let words = command.strip_prefix(MAIN_JOB).or(command.strip_prefix("crossmesh "))?;
    let words = words.replace("\\\n", " ");
    let said = common::said(common::binary().args(split(&words)).current_dir(page("")));
    Some(said.stdout + &said.stderr)
}

/// Words as a shell splits them, with single quotes and nothing else.
fn split(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut quoted = false;
    for c in line.chars() {
        match c {
            '\'' => quoted = !quoted,
            ' ' if !quoted => words.push(String::new()),
            _ => words.last_mut().expect("never empty").push(c),
        }
    }
    words.retain(|w| !w.is_empty());
    words
}

fn matches(shown: &[String], real: &[&str]) -> bool {
    match shown.iter().position(|line| line == "…") {
        None => shown == real,
        Some(gap) => {
            let (head, tail) = (&shown[..gap], &shown[gap + 1..]);
            head.len() + tail.len() <= real.len()
                && head == &real[..head.len()]
                && tail == &real[real.len() - tail.len()..]
        }
    }
}

/// The lines to show: the same cut as before, with today's text.
fn renewed(shown: &[String], real: &[&str]) -> Vec<String> {
    let owned = |lines: &[&str]| lines.iter().map(|l| l.to_string()).collect::<Vec<_>>();
    match shown.iter().position(|line| line == "…") {
        None => owned(real),
        Some(gap) => {
            let (head, tail) = (gap.min(real.len()), (shown.len() - gap - 1).min(real.len()));
            let mut lines = owned(&real[..head]);
            lines.push("…".into());
            lines.extend(owned(&real[real.len() - tail..]));
            lines
        }
    }
}

fn check(name: &str) {
    let text = std::fs::read_to_string(page(name)).unwrap();
    let mut lines: Vec<String> = text.lines().map(String::from).collect();
    let update = std::env::var_os("UPDATE_DOCS").is_some();
    let mut ran = 0;
    for example in shown(&text).iter().rev() {
        let Some(real) = run(&example.command) else { continue };
        let real: Vec<&str> = real.lines().collect();
        ran += 1;
        if update {
            lines.splice(example.at.clone(), renewed(&example.lines, &real));
        } else {
            assert!(
                matches(&example.lines, &real),
                "{name}: `{}` prints\n{}\nand not what is shown\nhint: UPDATE_DOCS=1 cargo test -p crossmesh-cli --test readme",
                example.command,
                real.join("\n")
            );
        }
    }
    assert!(ran > 0, "{name} shows no command of ours");
    if update {
        std::fs::write(page(name), lines.join("\n") + "\n").unwrap();
    }
}

#[test]
fn the_readme_shows_what_is_printed() {
    check("README.md");
}

#[test]
fn the_guide_shows_what_is_printed() {
    check("docs/first-plan.md");
}

/// Every command of the guide, as it stands there.
#[test]
fn the_guide_runs_line_by_line() {
    let text = std::fs::read_to_string(page("docs/first-plan.md")).unwrap();
    let scratch = Scratch::new();
    let blocks = shell_blocks(&text);
    assert!(blocks.len() >= 6, "{blocks:?}");
    for block in blocks {
        let out = said(&mut shell(&block, scratch.path()));
        assert_eq!(out.code, 0, "{block}\n{}{}", out.stdout, out.stderr);
    }
    for file in ["report.html", "nics.svg", "plan.json", "other.json"] {
        assert!(scratch.path().join(file).is_file(), "{file}");
    }
}

/// The main job says what the README shows, line by line; its numbers are those of a whole run, and this one is short.
#[test]
fn the_main_job_tells_what_the_readme_shows() {
    let text = std::fs::read_to_string(page("README.md")).unwrap();
    let job = shell_blocks(&text).into_iter().find(|block| block.starts_with(MAIN_JOB)).unwrap();
    let words = job
        .trim()
        .strip_prefix(MAIN_JOB)
        .unwrap()
        .replace("examples/", &format!("{}/", page("examples").display()));
    let shown = text.split("```text\n").nth(1).unwrap().split("```").next().unwrap();
    let scratch = Scratch::new();
    let short = ["--set", "train.steps=20", "--set", "checkpoint.every=20"];
    let out = said(common::binary().args(split(&words)).args(short).current_dir(scratch.path()));
    assert_eq!(out.code, 0, "{}{}", out.stdout, out.stderr);
    let printed = out.stdout + &out.stderr;
    let first = |line: &str| line.split_whitespace().next().unwrap_or_default().to_string();
    for line in shown.lines().filter(|line| *line != "…") {
        let word = first(line);
        assert!(printed.lines().any(|l| first(l) == word), "no line `{word} …` in\n{printed}");
    }
    assert!(printed.contains("trained gpt-mini to step 20 in "), "{printed}");
}

#[test]
fn the_page_on_schedules_shows_what_is_printed() {
    check("docs/schedules.md");
}

/// Every command of the page on fused layouts plans to within a few percent of the bound, and its file of pairs is one.
#[test]
fn the_commands_of_fused_layouts_run() {
    let text = std::fs::read_to_string(page("docs/fused-layouts.md")).unwrap();
    let examples = shown(&text);
    assert!(examples.len() >= 4, "{}", examples.len());
    for example in examples {
        let words = example.command.strip_prefix("crossmesh ").unwrap();
        let out = said(common::binary().args(split(words)));
        assert_eq!(out.code, 0, "{}\n{}", example.command, out.stderr);
        let over = out.last_line().rsplit(", ").next().and_then(|end| end.strip_suffix(" × the bound"));
        let over: f64 = over.unwrap_or_else(|| panic!("{}", out.stdout)).parse().unwrap();
        assert!((1.0..1.1).contains(&over), "{}: {over}", example.command);
    }
    let pairs = text.split("```text\n").find(|block| block.starts_with("q: ")).unwrap();
    let scratch = Scratch::new();
    let file = scratch.file("pairs.txt", pairs.split("```").next().unwrap());
    let out = common::ok(&["explain", file.to_str().unwrap()]);
    assert!(out.stdout.starts_with("reshard 3 tensors, "), "{}", out.stdout);
}

#[test]
fn a_gap_stands_for_any_lines() {
    let shown: Vec<String> = ["a", "…", "d"].map(String::from).to_vec();
    assert!(matches(&shown, &["a", "b", "c", "d"]));
    assert!(!matches(&shown, &["a", "b", "c"]));
    assert!(!matches(&shown, &["a"]));
    assert_eq!(split("explain 'a b' c"), ["explain", "a b", "c"]);
}
