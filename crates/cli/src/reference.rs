//! The command line's reference page, made from the commands themselves.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Command, CommandFactory};

const HEAD: &str = "# The command line

Made from `crossmesh --help`; change the help, then `UPDATE_DOCS=1 cargo test -p crossmesh-cli reference`.

Answers go to stdout, everything else to stderr. Exit status 0: yes. 1: the answer is no. 2: could not do it.
With `--format json` stdout is exactly one JSON document; [the formats](plan-format.md) have a page of their own.

A file of pairs (`--pairs`, or a single argument) has a line for each tensor; the name may be left out, `#` starts a comment:

```
# name  source                                     destination
wq: bf16[4096,4096]@A{fsdp:16}(fsdp,_) -> bf16[4096,4096]@B{dp:2,tp:8}(_,tp)
bf16[4096]@A{fsdp:16}(fsdp) -> bf16[4096]@B{dp:2,tp:8}(_)
```
";

fn render() -> String {
    let mut text = HEAD.to_string();
    let mut root = crate::Cli::command().term_width(100);
    root.build();
    add(&root, &mut text);
    text
}

fn add(command: &Command, text: &mut String) {
    let mut shown = command.clone();
    let help = shown.render_help().to_string();
    let help: Vec<&str> = help.lines().map(str::trim_end).collect();
    let name = command.get_bin_name().unwrap_or("crossmesh");
    let _ = write!(text, "\n## {name}\n\n```text\n{}\n```\n", help.join("\n").trim_end());
    for sub in command.get_subcommands() {
        add(sub, text);
    }
}

#[test]
fn reference_is_fresh() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, render()).unwrap();
    }
    let page = std::fs::read_to_string(&path).unwrap();
    assert!(
        page == render(),
        "docs/cli.md is stale\nhint: UPDATE_DOCS=1 cargo test -p crossmesh-cli reference"
    );
}
