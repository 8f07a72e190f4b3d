//! The Python package: built as `pip install .` would, without optimisation, and tested in an environment of its own.
//!
//! ```text
//! target/python        what is developed, with numpy, torch and jax: all tests, and models held against torch and transformers
//! target/frameworks    vLLM and TRL, unpacked; adapters' tests alone see them
//! target/python3.1x    the wheel, with numpy alone
//! ```

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::{cargo, has_venv, provide, say_and_run};

/// What is run from the wheel: everything of it that needs numpy alone, less what takes memory or a while and has been run before.
const OF_THE_WHEEL: [&str; 10] =
    ["plans", "job", "models", "maps", "checkpoint", "sync", "command", "mistakes", "stubs", "docstrings"];
const NOT_AGAIN: &str = "not test_no_copies";

pub fn ci(root: &Path) -> Result<()> {
    let folder = root.join("target/python");
    let program = |name: &str| folder.join("bin").join(name);
    if !program("maturin").exists() {
        provide(has_venv, "Python 3.11 with venv", &["python3", "python3-venv"])?;
        say_and_run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
        let needed = ["install", "-q", "maturin>=1.9,<2", "pytest>=8", "numpy>=2"];
        say_and_run(Command::new(program("pip")).args(needed))?;
    }
    let has = |package: &str| {
        let there = Command::new(program("python")).args(["-c", &format!("import {package}")]).output();
        there.is_ok_and(|out| out.status.success())
    };
    for (package, what) in
        [("jax", "layouts of shardings"), ("torch", "layouts of DTensors and the executor")]
    {
        if has(package) {
            continue;
        }
        let installed = say_and_run(Command::new(program("pip")).args(["install", "-q", package]));
        if installed.is_err() {
            skipped(&format!("{package} cannot be installed; its {what} are not tested"));
        }
    }
    if !has("matplotlib")
        && say_and_run(Command::new(program("pip")).args(["install", "-q", "matplotlib"])).is_err()
    {
        skipped("matplotlib cannot be installed; the plot of an example is not drawn");
    }
    // What others say of our checkpoints, and we of theirs: about 30 MB.
    let oracles = ["transformers", "safetensors", "psutil", "megatron-core==0.16.1"];
    let mut install = Command::new(program("pip"));
    if has("torch") && say_and_run(install.args(["install", "-q"]).args(oracles)).is_err() {
        let names = oracles.join(", ");
        skipped(&format!("{names} cannot be installed; checkpoints are not held against them"));
    }
    let mut develop = Command::new(program("maturin"));
    say_and_run(develop.args(["develop", "-q"]).env("VIRTUAL_ENV", &folder))?;
    test(root, &program("python"), frameworks(root, &program("pip"))?)?;
    if has("torch") {
        // All crates, as for their tests: what is built for these need not be built again.
        cargo(&["build", "-q", "--workspace", "--example", "gpt_logits", "--bin", "crossmesh"])?;
        say_and_run(Command::new(program("python")).args(["tests/torch_llama.py", "target/debug"]))?;
    } else {
        skipped("torch is not there; Llama is not held against it");
    }
    if has("transformers") {
        say_and_run(Command::new(program("python")).args(["tests/transformers_export.py", "target/debug"]))?;
    } else {
        skipped("transformers is not there; exports, validation and generation are not held against it");
    }
    let wheels = root.join("target/wheels");
    let mut build = Command::new(program("maturin"));
    say_and_run(build.args(["build", "-q", "--out"]).arg(&wheels).env("VIRTUAL_ENV", &folder))?;
    ["3.11", "3.12", "3.13"].into_iter().try_for_each(|version| wheel(root, version, &wheels))
}

fn skipped(what: &str) {
    eprintln!("==\n== SKIPPED: {what}\n==");
}

/// All tests; which of them were skipped, and why, is said at the end.
fn test(root: &Path, python: &Path, frameworks: Option<PathBuf>) -> Result<()> {
    let mut tests = Command::new(python);
    tests.args(["-m", "pytest"]);
    if let Some(folder) = &frameworks {
        tests.env("CROSSMESH_FRAMEWORKS", folder);
    }
    say_and_run(&mut tests)?;
    if std::env::var_os("CI").is_some() {
        // It was unpacked for these tests alone.
        remove(&root.join("target/frameworks"))?;
    }
    Ok(())
}

/// vLLM, TRL and what vLLM imports, none of it with its dependencies: a whole vLLM would bring another torch, and gigabytes. Where they cannot be had,
/// that is said, and the tests of their adapters say so too.
fn frameworks(root: &Path, pip: &Path) -> Result<Option<PathBuf>> {
    let folder = root.join("target/frameworks");
    let wanted = root.join("python/tests/frameworks.txt");
    let list =
        std::fs::read_to_string(&wanted).with_context(|| format!("cannot read {}", wanted.display()))?;
    let complete = folder.join("frameworks.txt");
    if std::fs::read_to_string(&complete).is_ok_and(|unpacked| unpacked == list) {
        return Ok(Some(folder));
    }
    remove(&folder)?;
    let options = ["install", "-q", "--no-deps", "--no-compile", "--target"];
    let mut install = Command::new(pip);
    if say_and_run(install.args(options).arg(&folder).arg("-r").arg(&wanted)).is_err() {
        skipped("vLLM and TRL cannot be unpacked; their adapters are not tested");
        remove(&folder)?;
        return Ok(None);
    }
    remove_kernels(&folder.join("vllm"))?;
    std::fs::write(&complete, list).with_context(|| format!("cannot write {}", complete.display()))?;
    Ok(Some(folder))
}

/// The shared objects of vLLM are for GPUs, and four fifths of what was unpacked; nothing here could load them.
fn remove_kernels(folder: &Path) -> Result<()> {
    for entry in std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            remove_kernels(&path)?;
        } else if path.extension().is_some_and(|extension| extension == "so") {
            std::fs::remove_file(&path)?;
        }
    }
    Ok(())
}

fn remove(folder: &Path) -> Result<()> {
    if folder.exists() {
        std::fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}

/// One wheel for all versions: the same file on each interpreter, with numpy alone.
fn wheel(root: &Path, version: &str, wheels: &Path) -> Result<()> {
    let Some(python) = interpreter(version) else {
        skipped(&format!("there is no Python {version}; the wheel is not tested on it"));
        return Ok(());
    };
    let folder = root.join(format!("target/python{version}"));
    let (pip, installed) = (folder.join("bin/pip"), folder.join("bin/python"));
    if !pip.exists() {
        say_and_run(Command::new(python).args(["-m", "venv"]).arg(&folder))?;
        say_and_run(Command::new(&pip).args(["install", "-q", "numpy>=2", "pytest>=8"]))?;
    }
    let install = ["install", "-q", "--no-deps", "--no-index", "--force-reinstall", "--find-links"];
    say_and_run(Command::new(&pip).args(install).arg(wheels).arg("crossmesh"))?;
    let files = OF_THE_WHEEL.map(|name| format!("python/tests/test_{name}.py"));
    say_and_run(Command::new(installed).args(["-m", "pytest", "-k", NOT_AGAIN]).args(files))
}

/// A Python of this version: on the path, or among those that pyenv keeps.
fn interpreter(version: &str) -> Option<PathBuf> {
    let named = PathBuf::from(format!("python{version}"));
    let works = |python: &Path| Command::new(python).arg("-V").output().is_ok_and(|out| out.status.success());
    let home = std::env::var_os("PYENV_ROOT").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".pyenv")));
    let kept = home.and_then(|home| std::fs::read_dir(home.join("versions")).ok());
    let kept = kept.into_iter().flatten().flatten().filter(|entry| {
        entry.file_name().to_string_lossy().strip_prefix(version).is_some_and(|rest| rest.starts_with('.'))
    });
    std::iter::once(named).chain(kept.map(|entry| entry.path().join("bin/python"))).find(|path| works(path))
}
