//! What `crossmesh train` writes: a manifest and a safetensors file for every rank (docs/checkpoint-format.md).

use std::collections::HashMap;
use std::path::Path;

use crossmesh_core::region::{Region, Span};
use serde::Deserialize;

use crate::catalog::{Catalog, Format, ProblemKind, StoredBox, Tensor, checked_bytes, is_inside};
use crate::error::CheckpointError;
use crate::safetensors::Header;

/// What stands between the document and its hash.
const SEAL: &str = ",\n  \"blake3\": \"";
const SCHEMA: &str = "crossmesh.checkpoint/1";
/// The state of a tensor that is the parameter itself.
const VALUE: &str = "value";

#[derive(Deserialize)]
struct Manifest {
    schema: String,
    dtype: String,
    files: Vec<FileEntry>,
    tensors: Vec<TensorEntry>,
}

#[derive(Deserialize)]
struct FileEntry {
    name: String,
    bytes: u64,
}

#[derive(Deserialize)]
struct TensorEntry {
    name: String,
    state: String,
    shape: Vec<u64>,
    boxes: Vec<BoxEntry>,
}

#[derive(Deserialize)]
struct BoxEntry {
    file: usize,
    key: String,
    at: u64,
    #[serde(rename = "box")]
    spans: Vec<[u64; 2]>,
}

pub fn open(folder: &Path) -> Result<Catalog, CheckpointError> {
    let path = folder.join(super::MANIFEST);
    let damaged = |what: String| CheckpointError::damaged(&path, what);
    let bytes = super::read_bytes(&path, super::MAX_EXTRA_BYTES)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| damaged("it is not UTF-8".into()))?;
    let manifest: Manifest =
        serde_json::from_str(text).map_err(|e| damaged(format!("it is no manifest: {e}")))?;
    if manifest.schema != SCHEMA {
        return Err(damaged(format!("its schema is `{}`; `{SCHEMA}` is what is read here", manifest.schema)));
    }
    let sealed = text.rsplit_once(SEAL).and_then(|(body, hash)| Some((body, hash.strip_suffix("\"\n}\n")?)));
    let differs = |(body, hash): (&str, &str)| blake3::hash(body.as_bytes()).to_hex().as_str() != hash;
    if sealed.is_none_or(differs) {
        return Err(damaged("it is not what was written: its hash differs".into()));
    }
    let element = manifest.dtype.parse().map_err(|()| damaged(format!("its dtype is {}", manifest.dtype)))?;
    let mut catalog = Catalog::empty(Format::Crossmesh, folder);
    let headers = files(&mut catalog, &manifest, &path)?;
    for entry in &manifest.tensors {
        let name =
            if entry.state == VALUE { entry.name.clone() } else { format!("{}/{}", entry.name, entry.state) };
        if checked_bytes(&entry.shape, element).is_none() {
            return Err(damaged(format!("`{name}`: {:?} is larger than can be", entry.shape)));
        }
        let mut boxes = Vec::new();
        for stored in &entry.boxes {
            let header =
                headers.get(stored.file).ok_or_else(|| damaged(format!("`{name}`: no such file")))?;
            let Some((_, key)) = header.entries.get(&stored.key) else {
                let what =
                    format!("`{name}`: no key `{}` in {}", stored.key, manifest.files[stored.file].name);
                catalog.notice(ProblemKind::MissingTensor, what);
                continue;
            };
            let region =
                region(&stored.spans).ok_or_else(|| damaged(format!("`{name}`: {:?}", stored.spans)))?;
            let at = stored
                .at
                .checked_mul(element.bytes())
                .and_then(|at| at.checked_add(header.start + key.data_offsets[0]));
            let offset = at.ok_or_else(|| damaged(format!("`{name}`: it lies behind everything")))?;
            boxes.push(StoredBox::packed(region, stored.file as u32, offset, element));
        }
        let tensor = Tensor { element, shape: entry.shape.clone(), boxes };
        if catalog.tensors.insert(name.clone(), tensor).is_some() {
            catalog.notice(ProblemKind::Twice, format!("`{name}`: it is there twice"));
        }
    }
    Ok(catalog)
}

fn region(spans: &[[u64; 2]]) -> Option<Region> {
    let span = |&[start, end]: &[u64; 2]| (start <= end).then(|| Span::new(start, end));
    Some(Region::new(spans.iter().map(span).collect::<Option<Vec<_>>>()?))
}

fn files(catalog: &mut Catalog, manifest: &Manifest, path: &Path) -> Result<Vec<Header>, CheckpointError> {
    let mut headers = Vec::new();
    let mut seen: HashMap<&str, ()> = HashMap::new();
    for entry in &manifest.files {
        if !is_inside(&entry.name) || seen.insert(&entry.name, ()).is_some() {
            return Err(CheckpointError::damaged(
                path,
                format!("`{}` is no name of a file of its own", entry.name),
            ));
        }
        let file = catalog.add_file(&entry.name);
        let have = catalog.files[file as usize].bytes;
        if let Some(bytes) = have.filter(|bytes| *bytes != entry.bytes) {
            let what = format!("{}: it has {bytes} bytes, and {} were written", entry.name, entry.bytes);
            catalog.notice(ProblemKind::ShortFile, what);
        }
        let header = match have {
            Some(_) => Header::read(&catalog.path(file))?.0,
            None => Header::default(),
        };
        headers.push(header);
    }
    Ok(headers)
}
