//! Our kernels as text: `.cu` files of this crate, and the names of their images.
//!
//! An image is named by the hash of all that it is made from, so that none of another source is taken for it: `norm.sm_90a.<hash>.cubin`.

/// What every file begins with.
pub const COMMON: &str = include_str!("../kernels/common.cuh");

/// The files, by name.
pub const MODULES: [(&str, &str); 9] = [
    ("attention", include_str!("../kernels/attention.cu")),
    ("boxes", include_str!("../kernels/boxes.cu")),
    ("columns", include_str!("../kernels/columns.cu")),
    ("embedding", include_str!("../kernels/embedding.cu")),
    ("loss", include_str!("../kernels/loss.cu")),
    ("norm", include_str!("../kernels/norm.cu")),
    ("pointwise", include_str!("../kernels/pointwise.cu")),
    ("product", include_str!("../kernels/product.cu")),
    ("update", include_str!("../kernels/update.cu")),
];

/// What images are made for ahead of time: the oldest cards that do, and Hopper's own instructions, which no later card runs.
pub const ARCHS: [&str; 2] = ["sm_80", "sm_90a"];

/// What a card runs: its own, or what an older card of its generation does.
pub fn arch(capability: (i32, i32)) -> String {
    match capability {
        (8, _) => "sm_80".into(),
        (9, 0) => "sm_90a".into(),
        (major, minor) => format!("sm_{major}{minor}"),
    }
}

/// All of a module's source, as compilers get it.
pub fn source(module: &str, text: &str) -> String {
    format!("{COMMON}\n#line 1 \"{module}.cu\"\n{text}")
}

/// The name of a module's image.
pub fn file_name(module: &str, text: &str, arch: &str) -> String {
    let hash = blake3::hash(format!("{arch}\n{}", source(module, text)).as_bytes());
    format!("{module}.{arch}.{}.cubin", &hash.to_hex()[..16])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn an_image_is_named_by_all_that_it_is_made_from() {
        let name = |text, arch| file_name("norm", text, arch);
        assert_eq!(name("a", "sm_80"), name("a", "sm_80"));
        assert_ne!(name("a", "sm_80"), name("b", "sm_80"));
        assert_ne!(name("a", "sm_80").split('.').nth(2), name("a", "sm_90a").split('.').nth(2));
        let archs = [(8, 9), (9, 0), (10, 3)].map(arch);
        assert_eq!(archs, ["sm_80", "sm_90a", "sm_103"]);
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
