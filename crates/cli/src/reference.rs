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
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help" && !sub.is_hide_set()) {
        add(sub, text);
    }
}

/// Every command, behind its name.
fn all(command: &Command) -> Vec<(String, Command)> {
    let name = command.get_bin_name().unwrap_or("crossmesh").to_string();
    let below = command.get_subcommands().flat_map(all);
    std::iter::once((name, command.clone())).chain(below).collect()
}

#[test]
fn examples_and_notes_fit_a_terminal_of_80_columns() {
    let mut root = crate::Cli::command();
    root.build();
    for (name, command) in all(&root) {
        let notes = command.get_after_help().into_iter().chain(command.get_after_long_help());
        for line in notes.map(|n| n.to_string()).collect::<Vec<_>>().join("\n").lines() {
            assert!(line.chars().count() <= 80, "{name} --help is broken at 80 columns: {line}");
        }
    }
}

/// Whoever reads answers by program asks every command in the same words. A completion script is for a shell alone.
#[test]
fn every_command_answers_in_json() {
    let mut root = crate::Cli::command();
    root.build();
    let answers = |(name, command): &(String, Command)| {
        let leaf = command.get_subcommands().next().is_none() || command.get_positionals().next().is_some();
        leaf && !command.is_hide_set() && !name.contains(" help") && !name.ends_with(" completions")
    };
    let commands: Vec<_> = all(&root).into_iter().filter(answers).collect();
    assert!(commands.len() > 20, "{}", commands.len());
    for (name, command) in commands {
        for flag in ["json", "format"] {
            let long = |arg: &clap::Arg| arg.get_long() == Some(flag);
            assert!(command.get_arguments().any(long), "{name} has no --{flag}");
        }
    }
}

#[test]
fn every_command_says_what_it_does_and_the_first_are_what_most_come_for() {
    let mut root = crate::Cli::command();
    root.build();
    for (name, command) in all(&root).into_iter().filter(|(_, command)| !command.is_hide_set()) {
        assert!(command.get_about().is_some(), "{name} has no help");
    }
    let first: Vec<&str> = root.get_subcommands().take(4).map(Command::get_name).collect();
    assert_eq!(first, ["train", "explain", "run", "schedule"]);
    let help = root.render_help().to_string();
    assert!(help.contains("docs/glossary.md") && help.contains("crossmesh help train"), "{help}");
}

/// `crossmesh …` in a page: what stands between backticks, and lines of blocks.
fn commands_of(page: &str) -> Vec<Vec<String>> {
    let joined = page.replace("\\\n", " ");
    // Between fences every line may be one; elsewhere a sentence may begin so.
    let blocks = joined.split("\n```").skip(1).step_by(2);
    let lines = blocks.flat_map(str::lines).map(|line| line.trim_start_matches("$ ").trim());
    let inline = joined.split('`').skip(1).step_by(2).map(str::trim);
    let commands = lines.chain(inline).map(|text| text.strip_prefix("sudo ").unwrap_or(text));
    let ours =
        commands.filter_map(|text| text.strip_prefix("crossmesh ").filter(|rest| !rest.contains('\n')));
    ours.map(|rest| rest.split_whitespace().map(String::from).collect()).collect()
}

/// Why a command of a page cannot be typed, if so: no such command, or no such flag.
fn untypable(root: &Command, words: &[String]) -> Option<String> {
    let (mut command, mut rest) = (root, words);
    while let Some(below) = rest.first().and_then(|word| command.find_subcommand(word)) {
        (command, rest) = (below, &rest[1..]);
    }
    if std::ptr::eq(command, root) {
        let first = words.first().map_or("", String::as_str);
        let prose = !first.starts_with(|c: char| c.is_ascii_lowercase());
        return (!prose).then(|| format!("there is no command `{first}`"));
    }
    // Behind `--` is a command of its own, behind `|`, `&&` and `#` something else.
    let own = rest.iter().take_while(|word| !["--", "|", "||", "&&", "#", ";"].contains(&word.as_str()));
    let flags = own.filter_map(|word| word.strip_prefix("--"));
    let names = flags.map(|flag| flag.split(['=', ',', '.', ')', '`', ';', ':']).next().unwrap_or(flag));
    let known = |name: &str| {
        command
            .get_arguments()
            .any(|arg| arg.get_long_and_visible_aliases().is_some_and(|all| all.contains(&name)))
    };
    names
        .filter(|name| !name.is_empty() && !["help", "version"].contains(name))
        .find(|name| !known(name))
        .map(|name| format!("`{}` has no flag --{name}", command.get_bin_name().unwrap_or_default()))
}

#[test]
fn every_command_of_the_pages_can_be_typed() {
    let mut root = crate::Cli::command();
    root.build();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    let docs = std::fs::read_dir(folder.join("docs")).unwrap().map(|entry| entry.unwrap().path());
    let pages =
        docs.filter(|path| path.extension().is_some_and(|e| e == "md")).chain([folder.join("README.md")]);
    // The reference is made from the help, whose examples are looked at themselves.
    let pages = pages.filter(|path| !path.ends_with("cli.md"));
    let pages = pages.map(|path| (path.display().to_string(), std::fs::read_to_string(&path).unwrap()));
    let notes = |(name, command): (String, Command)| {
        let examples = command.get_after_help().map(|notes| format!("\n```\n{notes}\n```"))?;
        Some((format!("{name} --help"), examples))
    };
    let (mut seen, mut wrong) = (0, vec![]);
    for (place, text) in pages.chain(all(&root).into_iter().filter_map(notes)) {
        for words in commands_of(&text) {
            seen += 1;
            let why = untypable(&root, &words);
            wrong.extend(why.map(|why| format!("{place}: crossmesh {}: {why}", words.join(" "))));
        }
    }
    assert!(seen > 100 && wrong.is_empty(), "{seen} commands, of which\n{}", wrong.join("\n"));
}

/// What ranks are started as is nobody's to type.
#[test]
fn hidden_commands_are_not_on_the_page() {
    let mut root = crate::Cli::command();
    root.build();
    let hidden: Vec<String> =
        all(&root).into_iter().filter(|(_, c)| c.is_hide_set()).map(|(name, _)| name).collect();
    assert!(hidden.contains(&"crossmesh rank".to_string()), "{hidden:?}");
    let page = render();
    for name in hidden {
        assert!(!page.contains(&format!("## {name}\n")), "{name}");
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
