//! What can be wrong with a GPU, in words that name what was found and what is needed.

/// The oldest driver that runs images of the toolkit our kernels are compiled with.
pub const NEEDED_CUDA: (i32, i32) = (13, 0);

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    #[error("this build has no CUDA\nhint: build it with `--features cuda`")]
    NotBuilt,
    #[error("there is no CUDA driver: none of {looked} can be loaded\nhint: install NVIDIA's driver for CUDA {}.{} or later, or use host memory", NEEDED_CUDA.0, NEEDED_CUDA.1)]
    NoDriver { looked: String },
    #[error("the driver knows CUDA {}.{}, and CUDA {}.{} is needed\nhint: install a newer driver (580 or later)", found / 1000, found % 1000 / 10, NEEDED_CUDA.0, NEEDED_CUDA.1)]
    OldDriver { found: i32 },
    #[error("the driver finds no GPU: {why}\nhint: look at nvidia-smi and at CUDA_VISIBLE_DEVICES")]
    NoDevice { why: String },
    #[error(
        "there is no GPU {asked}: the driver finds {found}\nhint: their numbers start at 0, and CUDA_VISIBLE_DEVICES hides some"
    )]
    NoSuchDevice { asked: usize, found: String },
    #[error(
        "{ranks} or more ranks want a GPU each, and the driver finds {count}\nhint: start fewer, or let them share with --share-gpus"
    )]
    Taken { ranks: usize, count: usize },
    #[error("{name} has compute capability {}.{}, and 8.0 is the least\nhint: bf16 and asynchronous copies came with it (A100)", capability.0, capability.1)]
    OldCard { name: String, capability: (i32, i32) },
    #[error(
        "no {bytes} B of {what} on {name}: {free} B of {total} B are free\nhint: give the GPU fewer ranks, or tensors that are smaller or split further"
    )]
    OutOfMemory { what: &'static str, name: String, bytes: u64, free: u64, total: u64 },
    #[error("{library} cannot be loaded; looked for {looked}\nhint: {hint}")]
    NoLibrary { library: &'static str, looked: String, hint: &'static str },
    #[error("{library} is version {found}, and {needed} is needed\nhint: {hint}")]
    WrongVersion { library: &'static str, found: String, needed: String, hint: &'static str },
    #[error(
        "there is no image of the kernels `{module}` for {arch}, and none can be compiled: {why}\nhint: `cargo xtask cuda` makes images for sm_80 and sm_90a; CROSSMESH_CUBINS names their folder; or install NVRTC"
    )]
    NoImage { module: String, arch: String, why: String },
    #[error(
        "the image of the kernels `{module}` is not for {card}: {why}\nhint: delete {path}, so that it is made again"
    )]
    WrongImage { module: String, card: String, path: String, why: String },
    #[error("the kernels `{module}` do not compile for {arch}:\n{log}")]
    Compile { module: String, arch: String, log: String },
    #[error("{call} failed on {name}: {why}")]
    Call { call: &'static str, name: String, why: String },
    #[error("{what} is {found}, and {needed} is needed")]
    Refused { what: &'static str, found: String, needed: &'static str },
}
