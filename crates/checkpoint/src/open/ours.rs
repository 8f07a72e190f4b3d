//! What `crossmesh train` writes: a manifest and a safetensors file for every rank (docs/checkpoint-format.md).
//!
//! Headers only, as of all formats; the hashes of files are compared by those who read numbers.

use std::collections::HashMap;
use std::path::Path;

use crate::catalog::{Catalog, Format, ProblemKind, StoredBox, Tensor, checked_bytes, is_inside};
use crate::element::Element;
use crate::error::CheckpointError;
use crate::manifest::{MANIFEST, Manifest, key_of};
use crate::model::config_of;
use crate::safetensors::Header;

pub fn open(folder: &Path) -> Result<Catalog, CheckpointError> {
    let path = folder.join(MANIFEST);
    let damaged = |what: String| CheckpointError::damaged(&path, what);
    let bytes = super::read_bytes(&path, super::MAX_EXTRA_BYTES)?;
    let text = std::str::from_utf8(&bytes).map_err(|_| damaged("it is no text".into()))?;
    let manifest = Manifest::parse(text, &path)?;
    let element = Element::Of(manifest.dtype());
    let mut catalog = Catalog::empty(Format::Crossmesh, folder);
    let headers = files(&mut catalog, &manifest, &path)?;
    for entry in &manifest.tensors {
        let name = key_of(&entry.name, &entry.state);
        if checked_bytes(&entry.shape, element).is_none() {
            return Err(damaged(format!("`{name}`: {:?} is larger than can be", entry.shape)));
        }
        let mut boxes = Vec::new();
        for stored in &entry.boxes {
            // That a file is missing was said once.
            let Some(header) = &headers[stored.file] else { continue };
            let region = stored.region().expect("the manifest was checked");
            let Some(key) = header.entries.get(&stored.key).filter(|key| key.element == element) else {
                let file = &manifest.files[stored.file].name;
                let what = format!("`{name}`: no {element} under the key `{}` of {file}", stored.key);
                catalog.notice(ProblemKind::MissingTensor, what);
                continue;
            };
            let range = header.range(key);
            let start = stored.at.checked_mul(element.bytes()).and_then(|at| at.checked_add(range.start));
            let bytes = region.volume() * element.bytes();
            let inside = |start: &u64| start.checked_add(bytes).is_some_and(|end| end <= range.end);
            let Some(offset) = start.filter(inside) else {
                let what = format!("`{name}`: {region} lies behind the end of the key `{}`", stored.key);
                catalog.notice(ProblemKind::Outside, what);
                continue;
            };
            boxes.push(StoredBox::packed(region, stored.file as u32, offset, element));
        }
        let tensor = Tensor { element, shape: entry.shape.clone(), boxes, value: None };
        if catalog.tensors.insert(name.clone(), tensor).is_some() {
            catalog.notice(ProblemKind::Twice, format!("`{name}`: it is there twice"));
        }
    }
    catalog.optimizer_steps = manifest.facts.optimizer.as_ref().map(|o| o.steps);
    catalog.config = config_of(&manifest.facts.model, element, None);
    catalog.facts = Some(manifest.facts);
    Ok(catalog)
}

/// The headers of all files; none of one that is missing.
fn files(
    catalog: &mut Catalog,
    manifest: &Manifest,
    path: &Path,
) -> Result<Vec<Option<Header>>, CheckpointError> {
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
        catalog.files[file as usize].blake3 = Some(entry.blake3.clone());
        let have = catalog.files[file as usize].bytes;
        if let Some(bytes) = have.filter(|bytes| *bytes != entry.bytes) {
            let what = format!("{}: it has {bytes} bytes, and {} were written", entry.name, entry.bytes);
            catalog.notice(ProblemKind::ShortFile, what);
        }
        headers.push(match have {
            Some(_) => Some(Header::read(&catalog.path(file))?),
            None => None,
        });
    }
    Ok(headers)
}
