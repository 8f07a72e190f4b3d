//! Rules about the tree that no compiler knows.
//!
//! Each rule is a function from a file (or the tree) to complaints; [`tidy`] prints them all and fails if there is one.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};

/// A file that outgrows this wants to be a folder.
const MAX_LINES: usize = 800;

/// What holds nothing of ours.
const SKIPPED: [&str; 6] = ["target", "out", ".git", ".venv", "__pycache__", "node_modules"];

/// A text file of the tree.
struct File {
    /// From the root, with `/`.
    path: String,
    text: String,
}

pub fn tidy(root: &Path) -> Result<()> {
    let mut files = Vec::new();
    read_tree(root, root, &mut files)?;
    files.sort_by(|a, b| a.path.cmp(&b.path));
    let mut complaints: Vec<String> = files.iter().flat_map(complaints_about).collect();
    complaints.extend(readme_commands(&files));
    complaints.extend(ci_calls_the_readme(&files));
    complaints.extend(broken_links(&files));
    for complaint in &complaints {
        eprintln!("tidy: {complaint}");
    }
    if !complaints.is_empty() {
        bail!("{} files are untidy", complaints.len());
    }
    eprintln!("== tidy: {} files in order", files.len());
    Ok(())
}

fn read_tree(root: &Path, folder: &Path, files: &mut Vec<File>) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        // `.git` is a file in a linked work tree.
        if SKIPPED.iter().any(|skipped| name == *skipped) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            read_tree(root, &path, files)?;
        } else if let Ok(text) = fs::read_to_string(&path) {
            files.push(File { path: relative(root, &path), text });
        }
    }
    Ok(())
}

fn relative(root: &Path, path: &Path) -> String {
    let parts: Vec<_> = path
        .strip_prefix(root)
        .unwrap_or(path)
        .components()
        .map(|c| c.as_os_str().to_string_lossy().into_owned())
        .collect();
    parts.join("/")
}

fn complaints_about(file: &File) -> Vec<String> {
    let rules = [too_long, machine_paths, loose_dependencies, trailing_blanks, missing_module_doc];
    rules.iter().flat_map(|rule| rule(file)).map(|what| format!("{}: {what}", file.path)).collect()
}

fn is_rust(file: &File) -> bool {
    file.path.ends_with(".rs")
}

fn too_long(file: &File) -> Option<String> {
    let lines = file.text.lines().count();
    (is_rust(file) && lines > MAX_LINES).then(|| format!("{lines} lines, more than {MAX_LINES}; split it"))
}

/// A path of one machine says nothing on another.
fn machine_paths(file: &File) -> Option<String> {
    // Written in two halves, so that this file is in order too.
    let words = [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/")];
    let (number, line) =
        file.text.lines().enumerate().find(|(_, line)| words.iter().any(|w| line.contains(w)))?;
    Some(format!("line {} names a path of one machine: {}", number + 1, line.trim()))
}

/// Versions live in one table, that of the workspace; `fuzz` is a workspace of its own.
fn loose_dependencies(file: &File) -> Option<String> {
    let of_ours = !file.text.lines().any(|line| line == "[workspace]");
    if !file.path.ends_with("Cargo.toml") || !of_ours {
        return None;
    }
    let mut in_dependencies = false;
    for line in file.text.lines().map(str::trim) {
        if line.starts_with('[') {
            in_dependencies = line.ends_with("dependencies]");
        } else if in_dependencies && !line.is_empty() && !line.starts_with('#') && !line.contains("workspace")
        {
            return Some(format!("dependency `{line}` is not taken from [workspace.dependencies]"));
        }
    }
    None
}

fn trailing_blanks(file: &File) -> Option<String> {
    let ours = [".rs", ".toml", ".md", ".py"].iter().any(|ending| file.path.ends_with(ending));
    let (number, _) =
        file.text.lines().enumerate().find(|(_, line)| ours && line.ends_with([' ', '\t', '\r']))?;
    Some(format!("line {} ends in blanks", number + 1))
}

/// A module starts like a short talk; the tests of one belong to its talk.
fn missing_module_doc(file: &File) -> Option<String> {
    let starts_well =
        file.path.ends_with("/tests.rs") || ["//!", "#!["].iter().any(|s| file.text.starts_with(s));
    (is_rust(file) && !starts_well).then(|| "no module documentation on its first line".to_string())
}

/// The README's two commands are there, word for word: other pages and CI rely on them.
fn readme_commands(files: &[File]) -> Vec<String> {
    let commands = [
        "cargo run --release -p crossmesh-cli --bin crossmesh -- train examples/gpt-mini.toml",
        "cargo xtask ci",
    ];
    let readme = files.iter().find(|f| f.path == "README.md").map_or("", |f| f.text.as_str());
    let missing = commands.iter().filter(|command| !readme.lines().any(|line| line.ends_with(**command)));
    missing.map(|command| format!("README.md: does not show `{command}`")).collect()
}

/// What a link of a page in a folder leads to.
fn resolved(folder: &str, link: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in link.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." => {}
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Links from page to page lead somewhere.
fn broken_links(files: &[File]) -> Vec<String> {
    let pages = files.iter().filter(|f| f.path.ends_with(".md"));
    pages
        .flat_map(|page| links(page).into_iter().map(move |link| (page, link)))
        .filter_map(|(page, link)| {
            let folder = page.path.rsplit_once('/').map_or("", |(folder, _)| folder);
            let target = resolved(folder, &link);
            let exists = files.iter().any(|f| f.path == target);
            (!exists).then(|| format!("{}: links to {link}, which is not there", page.path))
        })
        .collect()
}

/// Where the relative links of a page go, without what is behind a `#`.
fn links(page: &File) -> Vec<String> {
    let targets = page.text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    targets
        .filter(|t| t.contains(".md") && !t.contains("://"))
        .map(|t| t.split('#').next().unwrap_or(t).to_string())
        .collect()
}

fn ci_calls_the_readme(files: &[File]) -> Option<String> {
    let script = files.iter().find(|f| f.path == ".ci/run").map_or("", |f| f.text.as_str());
    let commands: Vec<&str> = script
        .lines()
        .filter(|line| !line.starts_with('#') && !line.starts_with("set ") && !line.starts_with("cd "))
        .collect();
    (commands != ["exec cargo xtask ci"])
        .then(|| ".ci/run: must call the README's test command and nothing else".to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.into(), text: text.into() }
    }

    #[test]
    fn a_tidy_file_passes() {
        assert_eq!(complaints_about(&file("a.rs", "//! What it is.\n")), Vec::<String>::new());
    }

    #[test]
    fn every_rule_can_complain() {
        let one = |path: &str, text: &str| complaints_about(&file(path, text)).join("\n");
        assert!(one("a.rs", &"//! x\n".repeat(MAX_LINES + 1)).contains("801 lines"));
        assert!(one("a.md", concat!("see /wo", "rk/x")).contains("line 1 names a path"));
        assert!(one("a.rs", "fn x() {}").contains("no module documentation"));
        assert!(one("a.md", "two \n").contains("line 1 ends in blanks"));
        let manifest = "[dependencies]\nserde = \"1\"\n";
        assert!(one("crates/x/Cargo.toml", manifest).contains("`serde = \"1\"`"));
        assert_eq!(one("crates/x/Cargo.toml", "[dependencies]\nserde.workspace = true\n"), "");
    }

    #[test]
    fn the_readme_and_ci_are_held_to_their_commands() {
        assert_eq!(readme_commands(&[file("README.md", "    cargo xtask ci")]).len(), 1);
        assert!(ci_calls_the_readme(&[file(".ci/run", "set -e\ncargo test\n")]).is_some());
    }

    #[test]
    fn a_link_to_nowhere_is_found() {
        let pages = [
            file("docs/a.md", "[b](b.md#x) [c](c.md) [b](../docs/b.md) [d](https://x.org/d.md)"),
            file("docs/b.md", ""),
        ];
        assert_eq!(broken_links(&pages), ["docs/a.md: links to c.md, which is not there"]);
    }

    #[test]
    fn paths_are_told_from_the_root() {
        assert_eq!(relative(Path::new("a"), Path::new("a/b/c.rs")), "b/c.rs");
    }
}
