//! From a folder to a [`Catalog`]: the format is told by what lies there.
//!
//! ```text
//! manifest.json with our schema      crossmesh
//! metadata.json beside .metadata     torch_dist
//! .metadata                          dcp
//! *.safetensors                      dcp-hf where they say which box they hold, hf otherwise
//! ```

mod dcp;
mod hf;
mod ours;

use std::path::{Path, PathBuf};

use crate::catalog::{Catalog, Format};
use crate::error::CheckpointError;
use crate::manifest::{FACTS, Facts, MANIFEST};

pub(crate) use dcp::METADATA;
pub(crate) use hf::{INDEX, SHAPES_KEY, SHARDING_KEY};

/// Larger files beside tensors are not carried along, and no document is read that is larger.
const MAX_EXTRA_BYTES: u64 = 256 << 20;

/// What reading headers may take beside what is allowed for buffers.
const HEADERS_BYTES: u64 = 256 << 20;
/// What is allowed for them where nobody says: `.metadata` of 100,000 tensors in 16 boxes each is allowed so much.
const OPEN_BYTES: u64 = 4 << 30;

/// Opens a checkpoint: a folder, a safetensors file, or a folder of Megatron's iterations. Reads headers only.
pub fn open(path: &Path) -> Result<Catalog, CheckpointError> {
    open_within(path, OPEN_BYTES)
}

/// The same for somebody who may take so much memory, and [`HEADERS_BYTES`] more: a `.metadata` that takes more is refused.
pub fn open_within(path: &Path, max_memory: u64) -> Result<Catalog, CheckpointError> {
    let meta = std::fs::metadata(path).map_err(CheckpointError::io("open", path))?;
    if meta.is_file() {
        return hf::open_file(path);
    }
    let folder = newest_iteration(path).unwrap_or_else(|| path.to_path_buf());
    let names = list(&folder)?;
    let has = |name: &str| names.iter().any(|n| n == name);
    let mut catalog = if is_ours(&folder) {
        ours::open(&folder)?
    } else if has(METADATA) {
        let format = if has("metadata.json") { Format::TorchDist } else { Format::Dcp };
        dcp::open(&folder, format, max_memory.saturating_add(HEADERS_BYTES))?
    } else if has(INDEX) || names.iter().any(|n| n.ends_with(".safetensors")) {
        hf::open(&folder, &names)?
    } else if has("common.pt") || has("metadata.json") || names.iter().any(|n| n.ends_with(".distcp")) {
        return Err(CheckpointError::damaged(
            &folder.join(METADATA),
            "it is not there, and without it nobody knows which tensor lies where\nhint: the save did not finish, or a copy left out files that begin with a dot",
        ));
    } else {
        let hint = "a folder with *.safetensors, with .metadata, or with our manifest.json".into();
        return Err(CheckpointError::Unknown { path: folder, hint });
    };
    carry_along(&mut catalog, &names)?;
    Ok(catalog)
}

/// Whether a folder is a checkpoint of ours. Other programs have files called manifest.json, beside what tells their formats.
pub fn is_ours(folder: &Path) -> bool {
    let has = |name: &str| folder.join(name).exists();
    has(MANIFEST) && ![METADATA, INDEX, "model.safetensors"].into_iter().any(has)
}

/// Names of the files in a folder, sorted.
fn list(folder: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = std::fs::read_dir(folder).map_err(CheckpointError::io("list", folder))?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(CheckpointError::io("list", folder))?;
        names.extend(entry.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// Megatron keeps iterations in folders, and the number of the last one in a file.
fn newest_iteration(path: &Path) -> Option<PathBuf> {
    let bytes = read_bytes(&path.join("latest_checkpointed_iteration.txt"), MAX_EXTRA_BYTES).ok()?;
    let name = match std::str::from_utf8(&bytes).ok()?.trim() {
        "release" => "release".to_string(),
        number => format!("iter_{:07}", number.parse::<u64>().ok()?),
    };
    Some(path.join(name)).filter(|p| p.is_dir())
}

/// Files that say what the tensors are for.
fn carry_along(catalog: &mut Catalog, names: &[String]) -> Result<(), CheckpointError> {
    let of_format = |name: &str| {
        [METADATA, INDEX, FACTS].contains(&name)
            || (catalog.format == Format::Crossmesh && name == MANIFEST)
            || [".safetensors", ".distcp", ".bin", ".pth"].iter().any(|end| name.ends_with(end))
            || (catalog.format != Format::TorchDist && name == "metadata.json")
    };
    let is_extra = |name: &&String| {
        let meta = std::fs::metadata(catalog.folder.join(name)).ok();
        !of_format(name) && meta.is_some_and(|m| m.is_file() && m.len() <= MAX_EXTRA_BYTES)
    };
    let path = |name: &String| (name.clone(), catalog.folder.join(name));
    catalog.extras = names.iter().filter(is_extra).map(path).collect();
    if let Some(path) = catalog.extras.get("config.json") {
        catalog.config = Some(read_json(path)?);
    }
    if catalog.format != Format::Crossmesh && names.iter().any(|name| name == FACTS) {
        let facts = Facts::read(&catalog.folder.join(FACTS))?;
        catalog.optimizer_steps = facts.optimizer.as_ref().map(|o| o.steps);
        catalog.facts = Some(facts);
    }
    Ok(())
}

/// A document of moderate size. Pipes and devices, which may never end, are refused before they are opened.
pub(crate) fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>, CheckpointError> {
    let meta = std::fs::metadata(path).map_err(CheckpointError::io("read", path))?;
    if !meta.is_file() {
        return Err(CheckpointError::damaged(path, "it is no regular file"));
    }
    let bytes = meta.len();
    if bytes > limit {
        return Err(CheckpointError::damaged(path, format!("it is {bytes} bytes long, more than {limit}")));
    }
    std::fs::read(path).map_err(CheckpointError::io("read", path))
}

pub(crate) fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, CheckpointError> {
    let bytes = read_bytes(path, MAX_EXTRA_BYTES)?;
    serde_json::from_slice(&bytes).map_err(|e| CheckpointError::damaged(path, format!("it is damaged: {e}")))
}
