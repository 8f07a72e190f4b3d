//! Finding NVIDIA's libraries. They are named by file, looked for where they usually are, and loaded once; what cannot be found is an error that
//! says where it was looked for.
//!
//! The bindings load a library by its name and panic without it. So each is looked for here first: what is loaded by its path answers to
//! its name from then on.

use std::ffi::{CStr, CString};
use std::ops::Range;
use std::path::{Path, PathBuf};

use cudarc::{cublaslt, driver, nvrtc};

use crate::error::{CudaError, NEEDED_CUDA};

/// Where toolkits and Python's wheels put libraries, besides what the loader knows.
fn folders() -> Vec<PathBuf> {
    let from = |name: &str, tail: &str| std::env::var_os(name).map(|root| Path::new(&root).join(tail));
    let mut folders: Vec<PathBuf> =
        ["CUDA_HOME", "CUDA_PATH"].iter().filter_map(|name| from(name, "lib64")).collect();
    folders.extend(["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu"].map(PathBuf::from));
    folders.extend(environments().iter().flat_map(|root| wheels(root)));
    folders
}

/// Python environments, the active one first: that of `VIRTUAL_ENV`, conda's, and the one whose `python3` is the first on `PATH`.
fn environments() -> Vec<PathBuf> {
    let named = ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let first = std::env::split_paths(&path).find(|folder| folder.join("python3").exists());
    let of_path = first.and_then(|bin| bin.parent().map(Path::to_path_buf));
    let mut found: Vec<PathBuf> = vec![];
    for root in named.chain(of_path.filter(|root| root.join("pyvenv.cfg").exists())) {
        if !found.contains(&root) {
            found.push(root);
        }
    }
    found
}

/// `site-packages/nvidia/cu13/lib` of an environment, and the one beside it that cuDNN has.
fn wheels(root: &Path) -> Vec<PathBuf> {
    let pythons = std::fs::read_dir(root.join("lib")).into_iter().flatten().flatten();
    let mut found: Vec<PathBuf> = pythons
        .flat_map(|python| {
            ["cu13", "cudnn"].map(|part| python.path().join("site-packages/nvidia").join(part).join("lib"))
        })
        .filter(|p| p.is_dir())
        .collect();
    found.sort();
    found
}

/// What the loader knows by these names, then what lies in folders.
fn places(names: &[&str]) -> Vec<PathBuf> {
    let in_folders = folders().into_iter().flat_map(|folder| names.iter().map(move |name| folder.join(name)));
    names.iter().map(PathBuf::from).chain(in_folders).collect()
}

/// A library's handle, if there is such a file and it can be loaded.
#[expect(unsafe_code, reason = "loading a library is calling its constructors")]
fn open(path: &Path) -> Option<*mut libc::c_void> {
    let file = CString::new(path.display().to_string()).ok()?;
    // SAFETY: a C string; NVIDIA's libraries may be loaded at any time, by any thread.
    let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    (!handle.is_null()).then_some(handle)
}

/// Loads the first of a library's files that there is, for the whole process. Returns where it was looked for, if nowhere.
fn load(names: &[&str]) -> Result<*mut libc::c_void, String> {
    let places = places(names);
    // Never closed: its functions are kept.
    places
        .iter()
        .find_map(|path| open(path))
        .ok_or_else(|| places.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "))
}

/// The driver, in a version that does.
#[expect(unsafe_code, reason = "calls of the driver's library")]
pub fn driver() -> Result<(), CudaError> {
    let none = |looked| CudaError::NoDriver { looked };
    let _loaded = load(&["libcuda.so.1", "libcuda.so"]).map_err(none)?;
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
    let _loaded = load(&["libnvrtc.so.13", "libnvrtc.so"]).map_err(none)?;
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
    let _loaded = load(&["libcublasLt.so.13", "libcublasLt.so"]).map_err(none)?;
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

/// cuDNN, whose attention is one kernel: the library, and its version (91900: 9.19.0). A machine may have several, and the loader's may be too old: the
/// first of these versions is taken.
///
/// Its parts have one name in all versions and stay loaded with the first that was asked; so files are asked for their version in a namespace of their own.
pub fn cudnn(versions: &Range<usize>) -> Result<(*mut libc::c_void, usize), CudaError> {
    const HINT: &str = "it comes with the wheel nvidia-cudnn-cu13; without it attention is slower";
    let none = |looked| CudaError::NoLibrary { library: "cuDNN", looked, hint: HINT };
    let places = places(&["libcudnn.so.9", "libcudnn.so"]);
    let mut others: Vec<String> = vec![];
    for path in &places {
        match version_of(path, c"cudnnGetVersion") {
            Some(version) if versions.contains(&version) => {
                let library = open_with_parts(path).ok_or_else(|| none(path.display().to_string()))?;
                return Ok((library, version));
            }
            Some(version) => others.push(format!("{version} at {}", path.display())),
            None => {}
        }
    }
    if others.is_empty() {
        return Err(none(
            places.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", "),
        ));
    }
    let needed = format!("{} to {}", versions.start, versions.end - 1);
    Err(CudaError::WrongVersion { library: "cuDNN", found: others.join(", "), needed, hint: HINT })
}

/// cuDNN looks for its parts by name: those beside it come first, whatever `LD_LIBRARY_PATH` says.
fn open_with_parts(path: &Path) -> Option<*mut libc::c_void> {
    if let Some(folder) = path.parent().filter(|folder| folder.is_absolute()) {
        for part in ["graph", "ops", "heuristic", "engines_runtime_compiled", "engines_precompiled"] {
            let _absent = open(&folder.join(format!("libcudnn_{part}.so.9")));
        }
    }
    open(path)
}

/// What a library's function without arguments returns, called where nothing else of the process sees the library.
#[expect(unsafe_code, reason = "a function of a library")]
fn version_of(path: &Path, function: &CStr) -> Option<usize> {
    let file = CString::new(path.display().to_string()).ok()?;
    // SAFETY: C strings; the function has no arguments, and the library is closed behind its last use.
    unsafe {
        let library = libc::dlmopen(libc::LM_ID_NEWLM, file.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL);
        if library.is_null() {
            return None;
        }
        let found = libc::dlsym(library, function.as_ptr());
        let version = (!found.is_null())
            .then(|| std::mem::transmute::<*mut libc::c_void, unsafe extern "C" fn() -> usize>(found)());
        libc::dlclose(library);
        version
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
