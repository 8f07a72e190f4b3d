//! safetensors: a file, several with an index, or DCP's boxes of tensors.
//!
//! DCP's storage says for every key where its box begins, and nowhere how large the tensor is: without the last file a
//! smaller tensor is all there is. We write the shapes as a further key of the header, which torch ignores; where it is
//! missing, the names of files may still tell how many there are, and `check` says what cannot be known.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crossmesh_core::region::{Region, Span};
use serde::Deserialize;

use crate::catalog::{Catalog, Format, ProblemKind, StoredBox, Tensor, is_inside};
use crate::error::CheckpointError;
use crate::safetensors::Header;

/// Which file has which tensor.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// torch's: where the box of every key begins.
pub(crate) const SHARDING_KEY: &str = "DCP_SHARDING_INFO";
/// Ours: the shapes of the whole tensors.
pub(crate) const SHAPES_KEY: &str = "CROSSMESH_SHAPES";

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Sharding {
    saved_offsets: Vec<u64>,
}

/// A single file.
pub fn open_file(path: &Path) -> Result<Catalog, CheckpointError> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_string();
    let mut reader = Reader::new(folder);
    reader.read(&name)?;
    reader.finish()
}

pub fn open(folder: &Path, names: &[String]) -> Result<Catalog, CheckpointError> {
    let mut reader = Reader::new(folder);
    if !names.iter().any(|n| n == INDEX) {
        for name in names.iter().filter(|n| n.ends_with(".safetensors")) {
            reader.read(name)?;
        }
        reader.look_for_lost_files();
        return reader.finish();
    }
    let path = folder.join(INDEX);
    let index: Index = super::read_json(&path)?;
    let files: BTreeSet<&String> = index.weight_map.values().collect();
    for name in &files {
        if !is_inside(name) {
            return Err(CheckpointError::damaged(&path, format!("`{name}` is no name of a file beside it")));
        }
        reader.read(name)?;
    }
    for name in names.iter().filter(|n| n.ends_with(".safetensors") && !files.contains(n)) {
        reader
            .catalog
            .notice(ProblemKind::Stray, format!("{name}: the index does not know it; it is not read"));
    }
    reader.compare(&index);
    reader.finish()
}

struct Reader {
    catalog: Catalog,
    /// Shapes that our own writer left.
    shapes: BTreeMap<String, Vec<u64>>,
    /// Which tensors each file has.
    held: BTreeMap<String, BTreeSet<String>>,
}

impl Reader {
    fn new(folder: &Path) -> Self {
        let catalog = Catalog::empty(Format::Hf, folder);
        Self { catalog, shapes: BTreeMap::new(), held: BTreeMap::new() }
    }

    fn read(&mut self, name: &str) -> Result<(), CheckpointError> {
        let file = self.catalog.add_file(name);
        let path = self.catalog.path(file);
        if self.catalog.files[file as usize].bytes.is_none() {
            return Ok(());
        }
        let header = Header::read(&path)?;
        let (end, there) = (header.end(), self.catalog.files[file as usize].bytes.unwrap_or(0));
        if there > end {
            let what = format!(
                "{name}: {} bytes behind the last tensor, for which safetensors refuses it",
                there - end
            );
            self.catalog.notice(ProblemKind::Stray, what);
        }
        let damaged = |what: String| CheckpointError::damaged(&path, what);
        let json = |key: &str| header.metadata.get(key);
        let sharding: Option<BTreeMap<String, Sharding>> = match json(SHARDING_KEY) {
            Some(text) => {
                Some(serde_json::from_str(text).map_err(|e| damaged(format!("its {SHARDING_KEY}: {e}")))?)
            }
            None => None,
        };
        if let Some(text) = json(SHAPES_KEY) {
            let shapes: BTreeMap<String, Vec<u64>> =
                serde_json::from_str(text).map_err(|e| damaged(format!("its {SHAPES_KEY}: {e}")))?;
            self.shapes.extend(shapes);
        }
        for (key, entry) in &header.entries {
            let element = &entry.element;
            let starts = match &sharding {
                Some(info) => {
                    self.catalog.format = Format::DcpHf;
                    let info = info.get(key).filter(|info| info.saved_offsets.len() == entry.shape.len());
                    info.map(|info| info.saved_offsets.clone())
                        .ok_or_else(|| damaged(format!("its {SHARDING_KEY} says nothing of `{key}`")))?
                }
                None => vec![0; entry.shape.len()],
            };
            let region = box_at(&starts, &entry.shape)
                .ok_or_else(|| damaged(format!("`{key}` begins at {starts:?}, outside of every tensor")))?;
            let end: Vec<u64> = region.spans().iter().map(|s| s.end).collect();
            let stored = StoredBox::packed(region, file, header.start + entry.data_offsets[0], *element);
            let empty = Tensor { element: *element, shape: end.clone(), boxes: vec![], value: None };
            let tensor = self.catalog.tensors.entry(key.clone()).or_insert(empty);
            if tensor.element != *element || tensor.shape.len() != end.len() {
                let what = format!(
                    "`{key}`: {} {:?} in one file, {element} {:?} in {name}",
                    tensor.element, tensor.shape, entry.shape
                );
                self.catalog.notice(ProblemKind::Dtype, what);
                continue;
            }
            tensor.shape.iter_mut().zip(end).for_each(|(n, end)| *n = end.max(*n));
            tensor.boxes.push(stored);
            self.held.entry(name.into()).or_default().insert(key.clone());
        }
        Ok(())
    }

    /// What the index says is in a file, and is not; and the reverse.
    fn compare(&mut self, index: &Index) {
        let mut problems = Vec::new();
        for (tensor, file) in &index.weight_map {
            let held = self.held.get(file);
            if held.is_none_or(|held| !held.contains(tensor)) {
                problems.push((
                    ProblemKind::MissingTensor,
                    format!("`{tensor}`: the index says it is in {file}, where it is not"),
                ));
            }
        }
        for (file, tensors) in &self.held {
            for tensor in tensors.iter().filter(|t| index.weight_map.get(*t) != Some(file)) {
                let elsewhere = index.weight_map.contains_key(tensor);
                let kind = if elsewhere { ProblemKind::Twice } else { ProblemKind::Stray };
                problems
                    .push((kind, format!("`{tensor}`: it is in {file}, where the index does not have it")));
            }
        }
        problems.into_iter().for_each(|(kind, what)| self.catalog.notice(kind, what));
    }

    /// `model-00001-of-00003` says that there are three.
    fn look_for_lost_files(&mut self) {
        let names: BTreeSet<String> = self.catalog.files.iter().map(|f| f.name.clone()).collect();
        let mut lost = BTreeSet::new();
        for name in &names {
            let Some((stem, number, count)) = numbered(name) else { continue };
            // Nobody cuts a model into more.
            if count > 100_000 || number > count {
                continue;
            }
            let digits = name[stem.len()..].find("-of-").unwrap_or(5);
            let others = (1..=count).map(|n| format!("{stem}{n:0digits$}-of-{count:0digits$}.safetensors"));
            lost.extend(others.filter(|other| !names.contains(other)));
        }
        for name in lost {
            let what = format!("{}: it is not there", self.catalog.folder.join(name).display());
            self.catalog.notice(ProblemKind::MissingFile, what);
        }
    }

    fn finish(mut self) -> Result<Catalog, CheckpointError> {
        let mut unknown = Vec::new();
        for (name, tensor) in &mut self.catalog.tensors {
            match self.shapes.get(name) {
                Some(shape) if shape.len() == tensor.shape.len() => tensor.shape.clone_from(shape),
                _ if self.catalog.format == Format::DcpHf => unknown.push(name.clone()),
                _ => {}
            }
        }
        for name in self.shapes.keys().filter(|name| !self.catalog.tensors.contains_key(*name)) {
            let what = format!("`{name}`: its shape is known, and no file has a box of it");
            self.catalog.noticed.push(crate::catalog::Problem { kind: ProblemKind::MissingTensor, what });
        }
        if let Some(first) = unknown.first() {
            let what = format!(
                "`{first}`{}: nothing tells how large it is, so that a lost last file would not be noticed",
                if unknown.len() > 1 { format!(" and {} more", unknown.len() - 1) } else { String::new() }
            );
            self.catalog.notice(ProblemKind::ShapeUnknown, what);
        }
        // The product of dims that each fit may not.
        let too_large = |t: &&Tensor| crate::catalog::checked_bytes(&t.shape, t.element).is_none();
        if let Some(tensor) = self.catalog.tensors.values().find(too_large) {
            return Err(CheckpointError::damaged(
                &self.catalog.folder,
                format!("a tensor of {:?}", tensor.shape),
            ));
        }
        Ok(self.catalog)
    }
}

/// The box of this shape that begins there.
pub(crate) fn box_at(starts: &[u64], shape: &[u64]) -> Option<Region> {
    let span = |(&start, &len): (&u64, &u64)| Some(Span::new(start, start.checked_add(len)?));
    Some(Region::new(starts.iter().zip(shape).map(span).collect::<Option<Vec<_>>>()?))
}

/// `a-00002-of-00003.safetensors` is `a-`, 2 and 3.
fn numbered(name: &str) -> Option<(&str, u64, u64)> {
    let (head, count) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
    let stem = head.trim_end_matches(|c: char| c.is_ascii_digit());
    let number = &head[stem.len()..];
    (number.len() == count.len()).then_some((stem, number.parse().ok()?, count.parse().ok()?))
}
