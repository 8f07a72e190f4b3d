//! Runs the real binary.

#![allow(dead_code)] // every test file uses a part of this

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What the binary said.
pub struct Said {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Said {
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e} in {}", self.stdout))
    }

    pub fn last_line(&self) -> &str {
        self.stdout.lines().last().unwrap_or("")
    }
}

pub fn binary() -> Command {
    Command::new(env!("CARGO_BIN_EXE_crossmesh"))
}

pub fn crossmesh<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Said {
    said(binary().args(args))
}

pub fn said(command: &mut Command) -> Said {
    let out = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said {
        code: out.status.code().expect("no signal ends it"),
        stdout: text(out.stdout),
        stderr: text(out.stderr),
    }
}

/// The blocks of shell commands of a page.
pub fn shell_blocks(page: &str) -> Vec<String> {
    let blocks = page.split("```sh\n").skip(1);
    blocks.map(|rest| rest.split("```").next().unwrap().to_string()).collect()
}

/// A shell that finds the binary, and stops at the first command that fails.
pub fn shell(script: &str, folder: &Path) -> Command {
    let program = PathBuf::from(binary().get_program());
    let path = format!(
        "{}:{}",
        program.parent().unwrap().display(),
        std::env::var_os("PATH").unwrap().to_string_lossy()
    );
    let mut command = Command::new("sh");
    command.args(["-ec", script]).current_dir(folder).env("PATH", path);
    command
}

/// With something on stdin.
pub fn crossmesh_reading(args: &[&str], input: &str) -> Said {
    let piped = || Stdio::piped();
    let mut child = binary().args(args).stdin(piped()).stdout(piped()).stderr(piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Said { code: out.status.code().unwrap(), stdout: text(out.stdout), stderr: text(out.stderr) }
}

/// Must answer yes.
pub fn ok<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> Said {
    let said = crossmesh(args);
    assert_eq!(said.code, 0, "{}{}", said.stdout, said.stderr);
    assert_eq!(said.stderr, "");
    said
}

/// Must refuse: exit 2, nothing on stdout, `error:` on stderr, no panic. Returns stderr.
pub fn refused<S: AsRef<std::ffi::OsStr>>(args: &[S]) -> String {
    let said = crossmesh(args);
    assert_eq!(said.code, 2, "{}{}", said.stdout, said.stderr);
    assert_eq!(said.stdout, "");
    assert!(said.stderr.starts_with("error: "), "{}", said.stderr);
    assert!(!said.stderr.contains("panicked"), "{}", said.stderr);
    said.stderr
}

/// A folder that is gone at the end of the test.
pub struct Scratch(tempfile::TempDir);

impl Scratch {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    pub fn path(&self) -> &Path {
        self.0.path()
    }

    pub fn file(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    }

    /// A path in it as an argument.
    pub fn at(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_string()
    }
}
