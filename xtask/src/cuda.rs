//! What CUDA needs of a build, without a GPU: the toolkit's compiler from PyPI, images of our kernels, and a folder to take to a machine that
//! has a GPU.
//!
//! Spilled registers cost more than they look: a kernel that spills fails here.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result, bail};
use crossmesh_cuda::kernels::{ARCHS, MODULES, file_name, source};

use crate::{cargo, cargo_with, has_venv, installed, provide, say_and_run};

/// The toolkit as wheels, about 105 MB: one version, that of the oldest driver we run on.
const WHEELS: [&str; 6] = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
    "nvidia-cuda-nvrtc==13.0.88",
];

/// What needs no GPU: the feature builds and lints, every kernel compiles for every card, by both compilers.
pub fn ci(root: &Path) -> Result<()> {
    let with = ["--features", "crossmesh-cuda/driver,crossmesh-comm/cuda,crossmesh-cli/cuda"];
    let crates = ["-p", "crossmesh-cuda", "-p", "crossmesh-comm", "-p", "crossmesh-cli"];
    if installed("clippy") {
        cargo(&[&["clippy"][..], &crates, &with, &["--lib", "--bins", "--", "-D", "warnings"]].concat())?;
    }
    cargo(&["test", "-p", "crossmesh-cuda", "--features", "driver", "--lib"])?;
    let Some(toolkit) = images(root)? else { return Ok(()) };
    let environment = toolkit.display().to_string();
    let one = ["test", "-p", "crossmesh-cuda", "--features", "driver", "--lib", "--", "--ignored", "nvrtc"];
    cargo_with(&one, &[("VIRTUAL_ENV", &environment)])
}

/// Compiles every module for every card. None if the compiler cannot be had, which is said loudly.
pub fn images(root: &Path) -> Result<Option<PathBuf>> {
    let Some(toolkit) = toolkit(root)? else { return Ok(None) };
    let (sources, cubins) = (root.join("target/cuda/sources"), root.join("target/cuda/cubins"));
    for folder in [&sources, &cubins] {
        std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let mut missing = vec![];
    for (module, text) in MODULES {
        let file = sources.join(format!("{module}.cu"));
        std::fs::write(&file, source(module, text))?;
        let images = ARCHS.map(|arch| (file.clone(), arch, cubins.join(file_name(module, text, arch))));
        missing.extend(images.into_iter().filter(|(_, _, image)| !image.exists()));
    }
    let next = AtomicUsize::new(0);
    let work = || -> Result<()> {
        while let Some((file, arch, image)) = missing.get(next.fetch_add(1, Ordering::Relaxed)) {
            compile(&toolkit, file, arch, image)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| -> Result<()> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..cores).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a compiler's thread does not panic"))
    })?;
    let (all, new) = (MODULES.len() * ARCHS.len(), missing.len());
    eprintln!("== cuda: {all} images in {}, {new} of them new", cubins.display());
    Ok(Some(toolkit))
}

fn compile(toolkit: &Path, file: &Path, arch: &str, image: &Path) -> Result<()> {
    let virtual_arch = arch.replace("sm_", "compute_");
    let part = image.with_extension("part");
    let mut nvcc = Command::new(nvcc(toolkit)?);
    nvcc.args(["-std=c++17", "-cubin", "-Xptxas", "-v"]);
    nvcc.arg(format!("-gencode=arch={virtual_arch},code={arch}")).arg("-o").arg(&part).arg(file);
    let done = nvcc.output().with_context(|| format!("cannot start {nvcc:?}"))?;
    let said = String::from_utf8_lossy(&done.stderr) + String::from_utf8_lossy(&done.stdout);
    if !done.status.success() {
        bail!("{} does not compile for {arch}:\n{said}", file.display());
    }
    if let Some(spilled) = spills(&said) {
        bail!("{} spills registers for {arch}: {spilled}", file.display());
    }
    std::fs::rename(&part, image).with_context(|| format!("cannot keep {}", image.display()))
}

/// The first kernel that spills, in the assembler's report: a line with its name, then one with its frame.
fn spills(report: &str) -> Option<String> {
    let mut kernel = "";
    for line in report.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            kernel = name.trim();
        }
        if line.contains("bytes spill stores") && !line.contains(" 0 bytes spill stores, 0 bytes spill loads")
        {
            return Some(format!("{kernel}: {}", line.trim()));
        }
    }
    None
}

/// An environment with the toolkit's wheels.
fn toolkit(root: &Path) -> Result<Option<PathBuf>> {
    let folder = root.join("target/cuda/toolkit");
    if nvcc(&folder).is_ok() {
        return Ok(Some(folder));
    }
    provide(has_venv, "Python 3.11 with venv", &["python3", "python3-venv"])?;
    say_and_run(Command::new("python3").args(["-m", "venv"]).arg(&folder))?;
    let mut install = Command::new(folder.join("bin/pip"));
    if say_and_run(install.args(["install", "-q"]).args(WHEELS)).is_err() {
        eprintln!("==\n== SKIPPED: the CUDA toolkit's wheels cannot be installed; no kernel was compiled");
        eprintln!("== hint: pip install {}\n==", WHEELS.join(" "));
        return Ok(None);
    }
    nvcc(&folder).map(|_| Some(folder))
}

fn nvcc(folder: &Path) -> Result<PathBuf> {
    let pythons = std::fs::read_dir(folder.join("lib")).into_iter().flatten().flatten();
    let mut found = pythons.map(|python| python.path().join("site-packages/nvidia/cu13/bin/nvcc"));
    found.find(|path| path.exists()).with_context(|| format!("there is no nvcc in {}", folder.display()))
}

/// One folder with all that a machine with a GPU needs: the program, images, and a script that runs everything.
pub fn bundle(root: &Path) -> Result<()> {
    // In one build: crates are compiled once for both programs.
    let with = [
        "-p",
        "crossmesh-cli",
        "-p",
        "crossmesh-train",
        "--features",
        "crossmesh-cli/cuda,crossmesh-train/cuda",
    ];
    let programs = ["--bin", "crossmesh", "--example", "gpu_kernels"];
    cargo(&[&["build", "--release"][..], &with, &programs].concat())?;
    images(root)?.context("a bundle needs images of the kernels")?;
    let folder = root.join("target/gpu");
    let cubins = folder.join("cubins");
    std::fs::create_dir_all(&cubins).with_context(|| format!("cannot make {}", cubins.display()))?;
    for entry in std::fs::read_dir(root.join("target/cuda/cubins"))? {
        let path = entry?.path();
        std::fs::copy(&path, cubins.join(path.file_name().context("a file has a name")?))?;
    }
    for (built, name) in [("crossmesh", "crossmesh"), ("examples/gpu_kernels", "gpu_kernels")] {
        let program = folder.join(name);
        std::fs::copy(root.join("target/release").join(built), &program)?;
        if !Command::new("strip").arg(&program).status().is_ok_and(|status| status.success()) {
            eprintln!("== gpu: without `strip` {name} is large");
        }
    }
    for entry in std::fs::read_dir(root.join("bench/gpu"))? {
        let file = entry?.file_name();
        std::fs::copy(root.join("bench/gpu").join(&file), folder.join(&file))?;
    }
    eprintln!("== gpu: {} is ready; on the other machine, sh run.sh and sh train.sh", folder.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spill_is_found_with_its_kernel() {
        let good = "ptxas info    : Function properties for norm\n    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n";
        assert_eq!(spills(good), None);
        let bad = format!(
            "{good}ptxas info    : Function properties for loss\n    8 bytes stack frame, 16 bytes spill stores, 16 bytes spill loads\n"
        );
        assert_eq!(
            spills(&bad).unwrap(),
            "loss: 8 bytes stack frame, 16 bytes spill stores, 16 bytes spill loads"
        );
    }
}
