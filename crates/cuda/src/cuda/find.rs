//! Finding NVIDIA's libraries. They are named by file, looked for where they usually are, and loaded once; what cannot be found is an error that
//! says where it was looked for.
//!
//! The bindings load a library by its name and panic without it. So each is looked for here first: what is loaded by its path answers to
//! its name from then on.

use std::ffi::CString;
use std::path::{Path, PathBuf};

use cudarc::{cublaslt, driver, nvrtc};

use crate::error::{CudaError, NEEDED_CUDA};

/// Where toolkits and Python's wheels put libraries, besides what the loader knows.
fn folders() -> Vec<PathBuf> {
    let from = |name: &str, tail: &str| std::env::var_os(name).map(|root| Path::new(&root).join(tail));
    let mut folders: Vec<PathBuf> =
        ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| from(name, "lib64")).collect();
    folders.extend(["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu"].map(PathBuf::from));
    folders.extend(wheels());
    folders
}

/// `site-packages/nvidia/cu13/lib` of the environment that is active.
fn wheels() -> Vec<PathBuf> {
    let Some(root) = std::env::var_os("VIRTUAL_ENV") else { return vec![] };
    let pythons = std::fs::read_dir(Path::new(&root).join("lib")).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = pythons
        .map(|python| python.path().join("site-packages/nvidia/cu13/lib"))
        .filter(|p| p.is_dir())
        .collect();
    found.sort();
    found
}

/// Loads the first of a library's files that there is, for the whole process. Returns where it was looked for, if nowhere.
#[expect(unsafe_code, reason = "loading a library is calling its constructors")]
fn load(names: &[&str]) -> Result<(), String> {
    let mut looked = vec![];
    let by_name = names.iter().map(PathBuf::from);
    let in_folders = folders().into_iter().flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    for path in by_name.chain(in_folders) {
        let Ok(file) = CString::new(path.display().to_string()) else { continue };
        // SAFETY: a C string; NVIDIA's libraries may be loaded at any time, by any thread.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if !handle.is_null() {
            return Ok(()); // never closed: its functions are kept
        }
        looked.push(path.display().to_string());
    }
    Err(looked.join(", "))
}

/// The driver, in a version that does.
#[expect(unsafe_code, reason = "calls of the driver's library")]
pub fn driver() -> Result<(), CudaError> {
    let none = |looked| CudaError::NoDriver { looked };
    load(&["libcuda.so.1", "libcuda.so"]).map_err(none)?;
    // SAFETY: asks whether it can be loaded.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(none("libcuda.so".into()));
    }
    let mut found = 0;
    // SAFETY: writes the version, and needs no context.
    let _stub = unsafe { driver::sys::cuDriverGetVersion(&raw mut found) };
    if found < NEEDED_CUDA.0 * 1000 + NEEDED_CUDA.1 * 10 {
        return Err(CudaError::OldDriver { found });
    }
    Ok(())
}

/// NVRTC, which compiles kernels when the program runs.
#[expect(unsafe_code, reason = "calls of its library")]
pub fn nvrtc() -> Result<(i32, i32), CudaError> {
    const HINT: &str = "it comes with the toolkit (CUDA_HOME), or with the wheel nvidia-cuda-nvrtc";
    let none = |looked| CudaError::NoLibrary { library: "NVRTC", looked, hint: HINT };
    // It looks for this one by name alone, and finds what is loaded already.
    let builtins =
        (0..8).map(|minor| format!("libnvrtc-builtins.so.{}.{minor}", NEEDED_CUDA.0)).collect::<Vec<_>>();
    let _by_the_loader = load(&builtins.iter().map(String::as_str).collect::<Vec<_>>());
    load(&["libnvrtc.so.13", "libnvrtc.so"]).map_err(none)?;
    // SAFETY: asks whether it can be loaded, then for its version.
    unsafe {
        if !nvrtc::sys::is_culib_present() {
            return Err(none("libnvrtc.so.13".into()));
        }
        let (mut major, mut minor) = (0, 0);
        nvrtc::sys::nvrtcVersion(&raw mut major, &raw mut minor);
        if major != NEEDED_CUDA.0 {
            let (found, needed) = (format!("{major}.{minor}"), format!("{}.x", NEEDED_CUDA.0));
            return Err(CudaError::WrongVersion { library: "NVRTC", found, needed, hint: HINT });
        }
        Ok((major, minor))
    }
}

/// cuBLASLt, which multiplies matrices.
#[expect(unsafe_code, reason = "calls of its library")]
pub fn cublaslt() -> Result<usize, CudaError> {
    const HINT: &str = "it comes with the toolkit (CUDA_HOME), or with the wheel nvidia-cublas";
    let none = |looked| CudaError::NoLibrary { library: "cuBLASLt", looked, hint: HINT };
    load(&["libcublasLt.so.13", "libcublasLt.so"]).map_err(none)?;
    // SAFETY: asks whether it can be loaded, then for its version.
    unsafe {
        if !cublaslt::sys::is_culib_present() {
            return Err(none("libcublasLt.so.13".into()));
        }
        let found = cublaslt::sys::cublasLtGetVersion();
        // 130100: 13.1.0.
        if found / 10_000 != NEEDED_CUDA.0 as usize {
            let (found, needed) = (found.to_string(), format!("{}xxxx", NEEDED_CUDA.0));
            return Err(CudaError::WrongVersion { library: "cuBLASLt", found, needed, hint: HINT });
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_named_with_where_it_was_looked_for() {
        let looked = load(&["libcrossmesh-nothing.so.13"]).unwrap_err();
        assert!(looked.starts_with("libcrossmesh-nothing.so.13, "), "{looked}");
        assert!(looked.contains("/usr/local/cuda/lib64/libcrossmesh-nothing.so.13"), "{looked}");
    }
}
