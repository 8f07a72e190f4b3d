//! Any bytes as one file of a small checkpoint, of any format: opened, checked, planned. Nothing panics, hangs or takes memory for what is not
//! there.
//!
//! The first byte says which file it is. As seeds, files of small checkpoints with such a byte in front: `fuzz/corpus/checkpoint`.
#![no_main]

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crossmesh_checkpoint::{Conversion, Format, NameMap, RunOptions, Spec, open};

/// A format, and the file of it that is replaced.
const FILES: [(Format, &str); 6] = [
    (Format::Hf, "model-00001-of-00002.safetensors"),
    (Format::Hf, "model.safetensors.index.json"),
    (Format::DcpHf, "shard-00001-model-00001-of-00001.safetensors"),
    (Format::Dcp, ".metadata"),
    (Format::Dcp, "__0_0.distcp"),
    (Format::Crossmesh, "manifest.json"),
];

/// A folder of this process, in memory where there is one, with a checkpoint for every file.
fn folder() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let memory = PathBuf::from("/dev/shm");
        let place = if memory.is_dir() { memory } else { std::env::temp_dir() };
        let folder = place.join(format!("crossmesh-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("start")).expect("a folder");
        let header = br#"{"a":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]},"b":{"dtype":"F32","shape":[2],"data_offsets":[24,32]}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header, &[7; 32]].concat();
        std::fs::write(folder.join("start/model.safetensors"), file).expect("room");
        for (i, (format, _)) in FILES.into_iter().enumerate() {
            let spec = Spec { shard_bytes: 24, ..Spec::new(format) };
            let plan = Conversion::plan(open(&folder.join("start")).expect("it is whole"), spec);
            plan.expect("it can").run(&folder.join(i.to_string()), &RunOptions::default()).expect("room");
        }
        folder
    })
}

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    let Some((which, bytes)) = data.split_first() else { return };
    let which = usize::from(*which) % (FILES.len() + 1);
    let Some((_, name)) = FILES.get(which) else {
        let _ = NameMap::parse(&String::from_utf8_lossy(bytes), "fuzz");
        return;
    };
    let folder = folder().join(which.to_string());
    std::fs::write(folder.join(name), bytes).expect("room");
    let Ok(catalog) = open(&folder) else { return };
    let _ = catalog.check();
    let _ = Conversion::plan(catalog, Spec::new(Format::Dcp));
});
