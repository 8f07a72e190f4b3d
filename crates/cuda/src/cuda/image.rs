//! Images of our kernels: `.cu` files of this crate, compiled for a card, kept in a folder by the hash of all that they were made from.
//!
//! ```text
//! CROSSMESH_CUBINS   what `cargo xtask cuda` made: norm.sm_90a.<hash>.cubin    no compiler is needed
//! the cache          what NVRTC made here before                              ~/.cache/crossmesh/cuda
//! NVRTC              compiles it now, and puts it into the cache
//! ```

use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};

use cudarc::nvrtc::sys;

use super::find;
use crate::CudaError;
use crate::kernels::{MODULES, file_name, source};

/// An image, and where it is kept.
pub struct Image {
    pub bytes: Vec<u8>,
    pub path: PathBuf,
}

/// The image of a module for a card.
pub fn image(module: &str, arch: &str) -> Result<Image, CudaError> {
    let (_, text) =
        MODULES.iter().find(|(name, _)| *name == module).expect("modules are named in this crate");
    let name = file_name(module, text, arch);
    let given = std::env::var_os("CROSSMESH_CUBINS").map(PathBuf::from);
    let kept = cache();
    for folder in [&given, &kept].into_iter().flatten() {
        if let Ok(bytes) = std::fs::read(folder.join(&name)) {
            return Ok(Image { bytes, path: folder.join(&name) });
        }
    }
    find::nvrtc().map_err(|error| CudaError::NoImage {
        module: module.into(),
        arch: arch.into(),
        why: error.to_string().replace('\n', "; "),
    })?;
    let bytes = compile(module, text, arch)?;
    let path = kept.map_or_else(PathBuf::new, |folder| folder.join(&name));
    // A cache that cannot be written costs time, nothing else.
    let _kept = keep(&path, &bytes);
    Ok(Image { bytes, path })
}

/// Where images and choices are kept.
pub fn cache() -> Option<PathBuf> {
    let home = || Some(Path::new(&std::env::var_os("HOME")?).join(".cache"));
    let root =
        std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(|p| p.is_absolute()).or_else(home)?;
    Some(root.join("crossmesh/cuda"))
}

/// Whole or not at all: others read it meanwhile.
fn keep(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().ok_or(std::io::ErrorKind::NotFound)?;
    std::fs::create_dir_all(folder)?;
    let part = path.with_extension(format!("{}.part", std::process::id()));
    std::fs::write(&part, bytes)?;
    std::fs::rename(&part, path)
}

/// By NVRTC.
#[expect(unsafe_code, reason = "calls of NVRTC")]
fn compile(module: &str, text: &str, arch: &str) -> Result<Vec<u8>, CudaError> {
    let failed = |log: String| CudaError::Compile { module: module.into(), arch: arch.into(), log };
    let text = CString::new(source(module, text)).expect("source is text");
    let file = CString::new(format!("{module}.cu")).expect("a name");
    let options =
        [format!("--gpu-architecture={arch}"), "--std=c++17".into()].map(|o| CString::new(o).expect("text"));
    let options: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    // SAFETY: C strings that live through the calls; sizes are asked for before buffers are filled.
    unsafe {
        let (none, names) = (std::ptr::null(), std::ptr::null());
        let made = sys::nvrtcCreateProgram(&raw mut program, text.as_ptr(), file.as_ptr(), 0, none, names);
        if made != sys::nvrtcResult::NVRTC_SUCCESS {
            return Err(failed(format!("{made:?}")));
        }
        let done = sys::nvrtcCompileProgram(program, options.len() as i32, options.as_ptr());
        let result = if done == sys::nvrtcResult::NVRTC_SUCCESS {
            let mut size = 0;
            sys::nvrtcGetCUBINSize(program, &raw mut size);
            let mut cubin = vec![0u8; size];
            sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast());
            Ok(cubin)
        } else {
            let mut size = 0;
            sys::nvrtcGetProgramLogSize(program, &raw mut size);
            let mut log = vec![0u8; size.max(1)];
            sys::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
            let log = CStr::from_bytes_until_nul(&log)
                .map_or_else(|_| String::new(), |l| l.to_string_lossy().into());
            Err(failed(log))
        };
        sys::nvrtcDestroyProgram(&raw mut program);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::ARCHS;

    /// NVRTC knows other headers than the compiler that makes images ahead of time, and has to do with less.
    #[test]
    #[ignore = "needs NVRTC; `cargo xtask cuda` provides it"]
    fn every_module_compiles_by_nvrtc() {
        find::nvrtc().unwrap();
        for (module, text) in MODULES {
            for arch in ARCHS {
                let image = compile(module, text, arch).unwrap_or_else(|error| panic!("{error}"));
                assert_eq!(image[..4], *b"\x7fELF", "{module} for {arch}");
            }
        }
    }
}
