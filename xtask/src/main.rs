//! The project's chores.
//!
//! ```text
//! cargo xtask check    the quick loop: fmt, clippy, docs, unit tests, tidy
//! cargo xtask ci       all of it: check, every test and doc test, benches kept alive, Miri, the features `mpi` and
//!                      `tokenizers`, the Python package, images of the CUDA kernels for every card, cargo-deny
//! cargo xtask cuda     the feature `cuda`: lints, tests, images of the kernels for every card, by both compilers; no GPU is needed
//! cargo xtask gpu      a folder that runs everything about CUDA on a machine with a GPU and without a Rust toolchain
//! cargo xtask python   the Python package alone
//! ```
//!
//! A tool that is not installed is named loudly and skipped; nothing else is.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

mod cuda;
mod python;
mod tidy;

const USAGE: &str = "usage: cargo xtask check | ci | cuda | gpu | python | tidy";

fn main() -> ExitCode {
    let task = std::env::args().nth(1);
    let done = match task.as_deref() {
        Some("check") => check(),
        Some("ci") => ci(),
        Some("cuda") => cuda::ci(&root()),
        Some("gpu") => cuda::bundle(&root()),
        Some("python") => python::ci(&root()),
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
    provide(|| runs("ip"), "ip", &["iproute2"])?;
    lint()?;
    cargo(&["test", "--workspace", "--all-targets"])?;
    cargo(&["test", "--workspace", "--doc"])?;
    miri()?;
    mpi()?;
    tokenizers()?;
    python::ci(&root())?;
    cuda::images(&root())?;
    if installed("deny") {
        // The advisory database is fetched over the network; the other checks need nothing but the lock file.
        cargo(&["deny", "check", "licenses", "bans", "sources"])?;
    }
    eprintln!("== ci passed");
    Ok(())
}

/// Miri looks at the code that has to be right about memory, as far as it can run it: no shared memory, no sockets.
fn miri() -> Result<()> {
    let found = Command::new("cargo").args(["+nightly", "miri", "--version"]).output();
    if !found.is_ok_and(|out| out.status.success()) {
        eprintln!(
            "==\n== SKIPPED: Miri is not installed; it did not look at `memory` and the pool of buffers"
        );
        eprintln!("== hint: rustup component add miri rust-src --toolchain nightly\n==");
        return Ok(());
    }
    let run =
        ["+nightly", "miri", "test", "-p", "crossmesh-comm", "--lib", "--", "memory::", "collectives::pool"];
    eprintln!("== cargo {}", run.join(" "));
    // The toolchain of this very run would stand in the way of another one.
    let status = Command::new("cargo")
        .args(run)
        .env_remove("RUSTUP_TOOLCHAIN")
        .env_remove("CARGO")
        .env("MIRIFLAGS", "-Zmiri-disable-isolation")
        .current_dir(root())
        .status()
        .context("cannot run Miri")?;
    if status.success() { Ok(()) } else { bail!("Miri found something, or could not run") }
}

/// What is built and tested only with the feature `mpi`.
fn mpi() -> Result<()> {
    provide(|| runs("mpirun") && runs("mpicc"), "OpenMPI", &["openmpi-bin", "libopenmpi-dev"])?;
    provide(has_libclang, "libclang", &["libclang-dev"])?;
    // All crates, so that those which have no such feature are not built again.
    let with = ["--workspace", "--features", "crossmesh-comm/mpi,crossmesh-cli/mpi"];
    let tests = ["--test", "conformance_mpi", "--test", "mpi", "--test", "joined"];
    if installed("clippy") {
        // What needs CUDA needs no toolkit to build, and is linted along.
        let both = "crossmesh-comm/mpi,crossmesh-cli/mpi,crossmesh-comm/cuda,crossmesh-cli/cuda";
        let linted = ["clippy", "--workspace", "--features", both, "--lib", "--bins"];
        cargo(&[&linted[..], &tests, &["--", "-D", "warnings"]].concat())?;
    }
    cargo(&[&["test"][..], &with, &tests].concat())
}

/// What is built and tested only with the feature `tokenizers`: a part of the data sets.
fn tokenizers() -> Result<()> {
    let with = ["-p", "crossmesh-train", "--features", "tokenizers", "--lib"];
    if installed("clippy") {
        cargo(&[&["clippy"][..], &with, &["--", "-D", "warnings"]].concat())?;
    }
    cargo(&[&["test"][..], &with, &["--", "data::"]].concat())
}

fn has_venv() -> bool {
    let try_it = "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))";
    Command::new("python3").args(["-c", try_it]).output().is_ok_and(|out| out.status.success())
}

fn say_and_run(command: &mut Command) -> Result<()> {
    let said = format!("{command:?}").replace('"', "");
    eprintln!("== {said}");
    let status = command.current_dir(root()).status().with_context(|| format!("cannot start {said}"))?;
    if status.success() { Ok(()) } else { bail!("{said} failed") }
}

/// Makes sure of something that tests need; on Debian, as root, it is installed.
fn provide(there: impl Fn() -> bool, what: &str, packages: &[&str]) -> Result<()> {
    if there() {
        return Ok(());
    }
    eprintln!("== {what} is not there; installing {}", packages.join(" "));
    for args in [vec!["update", "-qq"], [&["install", "-y", "-qq"][..], packages].concat()] {
        let installed = Command::new("apt-get").args(args).env("DEBIAN_FRONTEND", "noninteractive").status();
        if !installed.is_ok_and(|status| status.success()) {
            bail!("{what} is needed by the tests\nhint: install {}", packages.join(" "));
        }
    }
    Ok(())
}

fn runs(program: &str) -> bool {
    Command::new(program).arg("-V").output().is_ok()
}

/// Where Debian puts it, or where whoever has it elsewhere says.
fn has_libclang() -> bool {
    let folders = std::fs::read_dir("/usr/lib").into_iter().flatten().flatten().map(|entry| entry.path());
    let of_llvm = folders.filter(|path| path.to_string_lossy().contains("llvm-"));
    let files = of_llvm.flat_map(|path| std::fs::read_dir(path.join("lib")).into_iter().flatten().flatten());
    let mut names = files.map(|file| file.file_name().to_string_lossy().into_owned());
    // libclang-cpp is another library.
    let is_libclang = |name: &str| {
        let rest = name.strip_prefix("libclang").unwrap_or_default();
        rest.starts_with(".so")
            || rest.starts_with(['-']) && rest[1..].starts_with(|c: char| c.is_ascii_digit())
    };
    std::env::var_os("LIBCLANG_PATH").is_some() || names.any(|name| is_libclang(&name))
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
    let mut command = Command::new(cargo_path());
    if std::env::var_os("CI").is_some() {
        // Built once and thrown away: what a next build could reuse would only take disk.
        command.env("CARGO_INCREMENTAL", "0");
        // A submission is not judged by lot: properties are tried on the same inputs every time. Everywhere else they are drawn anew.
        command.env("PROPTEST_RNG_SEED", "20261119");
    }
    let status = command
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
