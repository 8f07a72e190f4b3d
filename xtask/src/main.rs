//! The project's chores.
//!
//! ```text
//! cargo xtask check    the quick loop: fmt, clippy, docs, unit tests, tidy
//! cargo xtask ci       all of it: check, every test and doc test, benches kept alive, cargo-deny
//! ```
//!
//! A tool that is not installed is named loudly and skipped; nothing else is.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

mod tidy;

const USAGE: &str = "usage: cargo xtask check | ci | tidy";

fn main() -> ExitCode {
    let task = std::env::args().nth(1);
    let done = match task.as_deref() {
        Some("check") => check(),
        Some("ci") => ci(),
        Some("tidy") => tidy::tidy(&root()),
        Some(other) => Err(anyhow::anyhow!("unknown task `{other}`\n{USAGE}")),
        None => Err(anyhow::anyhow!("{USAGE}")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The quick loop.
fn check() -> Result<()> {
    lint()?;
    cargo(&["test", "--workspace", "--lib", "--bins"])?;
    eprintln!("== check passed");
    Ok(())
}

/// Everything.
fn ci() -> Result<()> {
    provide("ip", "iproute2")?;
    lint()?;
    cargo(&["test", "--workspace", "--all-targets"])?;
    cargo(&["test", "--workspace", "--doc"])?;
    if installed("deny") {
        // The advisory database is fetched over the network; the other checks need nothing but the lock file.
        cargo(&["deny", "check", "licenses", "bans", "sources"])?;
    }
    eprintln!("== ci passed");
    Ok(())
}

/// Makes sure of a program that tests of emulated hosts call; on Debian, as root, it is installed.
fn provide(program: &str, package: &str) -> Result<()> {
    let there = || Command::new(program).arg("-V").output().is_ok();
    if there() {
        return Ok(());
    }
    eprintln!("== {program} is not there; installing {package}");
    for args in [&["update", "-qq"][..], &["install", "-y", "-qq", package]] {
        let installed = Command::new("apt-get").args(args).status();
        if !installed.is_ok_and(|status| status.success()) {
            bail!("{program} is needed by the tests of emulated hosts\nhint: install {package}");
        }
    }
    Ok(())
}

fn lint() -> Result<()> {
    tidy::tidy(&root())?;
    if installed("fmt") {
        cargo(&["fmt", "--all", "--check"])?;
    }
    if installed("clippy") {
        cargo(&["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"])?;
    }
    // Our readers read the source: private items are documented too, and may be linked to.
    let flags = "-D warnings -A rustdoc::private_intra_doc_links";
    cargo_with(&["doc", "--workspace", "--no-deps", "--document-private-items"], &[("RUSTDOCFLAGS", flags)])
}

/// Whether a cargo subcommand is there; says so loudly when it is not.
fn installed(subcommand: &str) -> bool {
    let found = Command::new(cargo_path())
        .args([subcommand, "--version"])
        .output()
        .is_ok_and(|out| out.status.success());
    if !found {
        eprintln!("==\n== SKIPPED: cargo {subcommand} is not installed; this check did not run\n==");
    }
    found
}

fn cargo(args: &[&str]) -> Result<()> {
    cargo_with(args, &[])
}

fn cargo_with(args: &[&str], env: &[(&str, &str)]) -> Result<()> {
    eprintln!("== cargo {}", args.join(" "));
    let status = Command::new(cargo_path())
        .args(args)
        .envs(env.iter().copied())
        .current_dir(root())
        .status()
        .with_context(|| format!("cannot start cargo {}", args.join(" ")))?;
    if !status.success() {
        bail!("cargo {} failed", args.join(" "));
    }
    Ok(())
}

/// The cargo that runs us.
fn cargo_path() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| "cargo".into(), PathBuf::from)
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").to_path_buf()
}
