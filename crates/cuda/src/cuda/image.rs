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

/// What every file begins with.
const COMMON: &str = include_str!("../../kernels/common.cuh");

/// The files, by name.
pub const MODULES: [(&str, &str); 7] = [
    ("boxes", include_str!("../../kernels/boxes.cu")),
    ("columns", include_str!("../../kernels/columns.cu")),
    ("embedding", include_str!("../../kernels/embedding.cu")),
    ("loss", include_str!("../../kernels/loss.cu")),
    ("norm", include_str!("../../kernels/norm.cu")),
    ("pointwise", include_str!("../../kernels/pointwise.cu")),
    ("update", include_str!("../../kernels/update.cu")),
];

/// What a card runs: its own, or what an older card of its generation does.
pub fn arch(capability: (i32, i32)) -> String {
    match capability {
        (8, _) => "sm_80".into(),
        (9, 0) => "sm_90a".into(),
        (major, minor) => format!("sm_{major}{minor}"),
    }
}

/// The name of a module's image: with the hash of its source, so that no image of another source is taken for it.
pub fn file_name(module: &str, source: &str, arch: &str) -> String {
    let mut hash = blake3::Hasher::new();
    for part in [COMMON, source, arch] {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    format!("{module}.{arch}.{}.cubin", &hash.finalize().to_hex()[..16])
}

/// An image, and where it is kept.
pub struct Image {
    pub bytes: Vec<u8>,
    pub path: PathBuf,
}

/// The image of a module for a card.
pub fn image(module: &str, arch: &str) -> Result<Image, CudaError> {
    let (_, source) =
        MODULES.iter().find(|(name, _)| *name == module).expect("modules are named in this crate");
    let name = file_name(module, source, arch);
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
    let bytes = compile(module, source, arch)?;
    let path = kept.map_or_else(PathBuf::new, |folder| folder.join(&name));
    // A cache that cannot be written costs time, nothing else.
    let _kept = keep(&path, &bytes);
    Ok(Image { bytes, path })
}

fn cache() -> Option<PathBuf> {
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
fn compile(module: &str, source: &str, arch: &str) -> Result<Vec<u8>, CudaError> {
    let failed = |log: String| CudaError::Compile { module: module.into(), arch: arch.into(), log };
    let text = CString::new(format!("{COMMON}\n#line 1 \"{module}.cu\"\n{source}")).expect("source is text");
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

    #[test]
    fn an_image_is_named_by_all_that_it_is_made_from() {
        let name = |source, arch| file_name("norm", source, arch);
        assert_eq!(name("a", "sm_80"), name("a", "sm_80"));
        assert_ne!(name("a", "sm_80"), name("b", "sm_80"));
        assert_ne!(name("a", "sm_80").split('.').nth(2), name("a", "sm_90a").split('.').nth(2));
        assert_eq!(
            (arch((8, 9)).as_str(), arch((9, 0)).as_str(), arch((10, 3)).as_str()),
            ("sm_80", "sm_90a", "sm_103")
        );
    }

    /// Every file of the folder is a module.
    #[test]
    fn no_kernel_is_forgotten() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
        let mut files: Vec<String> = std::fs::read_dir(folder)
            .unwrap()
            .filter_map(|file| Some(file.unwrap().file_name().to_str()?.strip_suffix(".cu")?.to_string()))
            .collect();
        files.sort();
        assert_eq!(files, MODULES.map(|(name, _)| name));
    }
}
