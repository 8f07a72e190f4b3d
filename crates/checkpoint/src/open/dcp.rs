//! torch.distributed.checkpoint, and Megatron's `torch_dist`, which is one: `.metadata` and `.distcp` files.
//!
//! ```text
//! .metadata       a pickle: for every tensor its shape, type and boxes; for every box a file, an offset and a length
//! __0_0.distcp    items one behind the other: a zip file of torch for every box, a pickle for what is no tensor
//! ```

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::Path;

use crossmesh_core::region::Region;

use super::hf::box_at;
use crate::catalog::{
    Catalog, Format, Object, PathStep, ProblemKind, StoredBox, Tensor, checked_bytes, is_inside,
};
use crate::element::Element;
use crate::error::CheckpointError;
use crate::pickle::{Id, Pickle, PickleError};
use crate::zip;

pub(crate) const METADATA: &str = ".metadata";
/// So many boxes may be missing and are named.
const MAX_MISSING: usize = 100_000;

/// All that `.metadata` may name.
fn of_metadata(module: &str, name: &str) -> bool {
    match module {
        "torch.distributed.checkpoint.metadata" => matches!(
            name,
            "Metadata"
                | "TensorStorageMetadata"
                | "ChunkStorageMetadata"
                | "TensorProperties"
                | "MetadataIndex"
                | "StorageMeta"
                | "BytesStorageMetadata"
                | "_MEM_FORMAT_ENCODING"
        ),
        "torch.distributed.checkpoint.filesystem" => name == "_StorageInfo",
        "torch.distributed.checkpoint.planner" => {
            matches!(
                name,
                "SavePlan" | "WriteItem" | "TensorWriteData" | "WriteItemType" | "BytesIOWriteData"
            )
        }
        "megatron.core.dist_checkpointing.strategies.torch" => {
            matches!(name, "MCoreMetadata" | "MCoreSavePlan")
        }
        "torch" => matches!(name, "Size" | "strided" | "device") || Element::of_torch(name).is_some(),
        "torch.serialization" => name == "_get_layout",
        "pathlib" | "pathlib._local" => matches!(name, "PosixPath" | "WindowsPath" | "PurePosixPath"),
        "collections" => name == "OrderedDict",
        _ => false,
    }
}

/// Opens it with no more memory than `max_memory`: of that, the file itself is a part, and what is left is for what its pickle describes
/// and, a quarter, for the catalog that is made of it.
pub fn open(folder: &Path, format: Format, max_memory: u64) -> Result<Catalog, CheckpointError> {
    let path = folder.join(METADATA);
    let too_large = || {
        let what = format!(
            "to read it takes more than the {max_memory} bytes of memory that there may be\nhint: allow more, if it is a checkpoint of so many boxes"
        );
        CheckpointError::damaged(&path, what)
    };
    let len = std::fs::metadata(&path).map_or(0, |meta| meta.len());
    let left = max_memory.checked_sub(len).ok_or_else(too_large)?;
    let bytes = super::read_bytes(&path, max_memory)?;
    let pickle = Pickle::read(&bytes, left - left / 4, of_metadata).map_err(|e| match e {
        PickleError::Global(global) => CheckpointError::Global { path: path.clone(), global },
        PickleError::Memory(_) => too_large(),
        other => CheckpointError::damaged(&path, other.to_string()),
    })?;
    let mut reader = Reader { catalog: Catalog::empty(format, folder), path: &path, pickle: &pickle };
    let items = reader.items()?;
    reader.tensors(items)?;
    reader.paths();
    Ok(reader.catalog)
}

struct Reader<'a> {
    catalog: Catalog,
    path: &'a Path,
    pickle: &'a Pickle<'a>,
}

/// Where a box is said to lie.
#[derive(Debug, Clone, Copy)]
struct Item {
    file: u32,
    offset: u64,
    bytes: u64,
}

/// Of a tensor: its boxes by where they begin. Of something else, one without a beginning.
type Items<'a> = HashMap<&'a str, BTreeMap<Option<Vec<u64>>, Item>>;

impl<'a> Reader<'a> {
    fn damaged(&self, what: impl Into<String>) -> CheckpointError {
        CheckpointError::damaged(self.path, what)
    }

    fn attribute(&self, name: &str) -> Result<Id, CheckpointError> {
        let pickle = self.pickle;
        let metadata = ("torch.distributed.checkpoint.metadata", "Metadata");
        if pickle.callable(pickle.root) != Some(metadata) {
            return Err(self.damaged("it is no pickle of DCP's Metadata"));
        }
        pickle.attribute(pickle.root, name).ok_or_else(|| self.damaged(format!("it has no `{name}`")))
    }

    /// `storage_data`: where every box lies.
    fn items(&mut self) -> Result<Items<'a>, CheckpointError> {
        let entries = self.attribute("storage_data")?;
        let entries = self.pickle.dict(entries).ok_or_else(|| self.damaged("its storage_data is no dict"))?;
        let mut files: HashMap<&str, u32> = HashMap::new();
        let mut items: Items<'a> = HashMap::new();
        for &(key, value) in entries {
            let (name, start) = self.index(key).ok_or_else(|| self.damaged("a MetadataIndex is damaged"))?;
            let (relative, offset, bytes) = self
                .info(value)
                .ok_or_else(|| self.damaged(format!("`{name}`: where it lies is damaged")))?;
            if self.pickle.attribute(value, "transform_descriptors").is_some_and(|id| self.is_something(id)) {
                return Err(self.damaged(format!(
                    "`{name}` was transformed when it was written, for instance compressed\nhint: save it without extensions"
                )));
            }
            if !is_inside(relative) {
                return Err(self.damaged(format!("`{relative}` is no name of a file beside it")));
            }
            let file = *files.entry(relative).or_insert_with(|| self.catalog.add_file(relative));
            let item = Item { file, offset, bytes };
            if items.entry(name).or_default().insert(start.clone(), item).is_some() {
                let what = format!(
                    "`{name}`: the box that begins at {:?} is there twice",
                    start.unwrap_or_default()
                );
                self.catalog.notice(ProblemKind::Twice, what);
            }
        }
        Ok(items)
    }

    fn is_something(&self, id: Id) -> bool {
        let pickle = self.pickle;
        pickle.list(id).map_or(*pickle.node(id) != crate::pickle::Node::None, |list| !list.is_empty())
    }

    fn index(&self, key: Id) -> Option<(&'a str, Option<Vec<u64>>)> {
        let pickle = self.pickle;
        let name = pickle.str(pickle.attribute(key, "fqn")?)?;
        let start = match pickle.attribute(key, "offset") {
            Some(id) if *pickle.node(id) != crate::pickle::Node::None => Some(pickle.sizes(id)?),
            _ => None,
        };
        Some((name, start))
    }

    fn info(&self, value: Id) -> Option<(&'a str, u64, u64)> {
        let pickle = self.pickle;
        let number = |name| pickle.int(pickle.attribute(value, name)?)?.try_into().ok();
        let path = pickle.str(pickle.attribute(value, "relative_path")?)?;
        let (offset, bytes): (u64, u64) = (number("offset")?, number("length")?);
        offset.checked_add(bytes)?;
        Some((path, offset, bytes))
    }

    /// `state_dict_metadata`: the shapes and boxes.
    fn tensors(&mut self, mut items: Items<'a>) -> Result<(), CheckpointError> {
        let pickle = self.pickle;
        let entries = self.attribute("state_dict_metadata")?;
        let entries =
            pickle.dict(entries).ok_or_else(|| self.damaged("its state_dict_metadata is no dict"))?;
        let mut open = OpenFiles::default();
        // One list may be the boxes of many tensors: no more are looked at than lie in files, and some that may be missing.
        let stored: usize = items.values().map(BTreeMap::len).sum();
        let boxes = |&(_, value): &(Id, Id)| pickle.list(pickle.attribute(value, "chunks")?).map(<[Id]>::len);
        if entries.iter().filter_map(boxes).sum::<usize>() > 2 * stored + MAX_MISSING {
            return Err(
                self.damaged(format!("it speaks of many more boxes than the {stored} that lie in files"))
            );
        }
        for &(key, value) in entries {
            let name = pickle.str(key).ok_or_else(|| self.damaged("a name is no string"))?;
            let places = items.remove(name).unwrap_or_default();
            match pickle.callable(value) {
                Some((_, "BytesStorageMetadata")) => self.object(name, &places),
                Some((_, "TensorStorageMetadata")) => self.tensor(name, value, places, &mut open)?,
                _ => return Err(self.damaged(format!("`{name}` is neither a tensor nor bytes"))),
            }
        }
        if let Some(name) = items.keys().min() {
            let what = format!("`{name}`: it lies in a file, and nothing says what it is");
            self.catalog.notice(ProblemKind::Stray, what);
        }
        Ok(())
    }

    /// `planner_data`, where it says how names were nested; whatever else it is, nobody needs.
    fn paths(&mut self) {
        let pickle = self.pickle;
        let data = pickle.attribute(pickle.root, "planner_data").and_then(|id| pickle.dict(id));
        for &(key, value) in data.unwrap_or_default() {
            let step = |&id: &Id| match (pickle.str(id), pickle.int(id)) {
                (Some(key), _) => Some(PathStep::Key(key.into())),
                (_, index) => Some(PathStep::Index(index?.try_into().ok()?)),
            };
            let Some(name) = pickle.str(key) else { continue };
            // A name is its keys and what stands between them: what is longer is something else, which may be shared by many.
            let letters =
                |list: &[Id]| list.iter().map(|&id| 1 + pickle.str(id).map_or(0, str::len)).sum::<usize>();
            let list = pickle
                .list(value)
                .filter(|list| list.len() <= name.len() + 1 && letters(list) <= 2 * name.len() + 2);
            if let Some(path) = list.and_then(|list| list.iter().map(step).collect::<Option<Vec<_>>>()) {
                self.catalog.paths.insert(name.into(), path);
            }
        }
    }

    fn object(&mut self, name: &str, places: &BTreeMap<Option<Vec<u64>>, Item>) {
        match places.values().next() {
            Some(&Item { file, offset, bytes }) => {
                let end = offset + bytes;
                if self.catalog.files[file as usize].bytes.is_some_and(|have| end > have) {
                    let what =
                        format!("`{name}` ends at byte {end} of {}", self.catalog.files[file as usize].name);
                    self.catalog.notice(ProblemKind::ShortFile, what);
                }
                self.catalog.objects.insert(name.into(), Object { file, offset, bytes });
            }
            None => self.catalog.notice(ProblemKind::MissingTensor, format!("`{name}`: no file has it")),
        }
    }

    fn tensor(
        &mut self,
        name: &str,
        value: Id,
        mut places: BTreeMap<Option<Vec<u64>>, Item>,
        open: &mut OpenFiles,
    ) -> Result<(), CheckpointError> {
        let (element, shape, chunks) = self
            .described(value)
            .ok_or_else(|| self.damaged(format!("`{name}`: its type or shape is damaged")))?;
        if checked_bytes(&shape, element).is_none() {
            return Err(self.damaged(format!("`{name}`: {shape:?} is larger than can be")));
        }
        let mut boxes = Vec::with_capacity(chunks.len());
        for region in chunks {
            let start: Vec<u64> = region.spans().iter().map(|s| s.start).collect();
            let Some(item) = places.remove(&Some(start)) else {
                self.catalog
                    .notice(ProblemKind::MissingTensor, format!("`{name}`: no file has its box {region}"));
                continue;
            };
            let short = self.catalog.files[item.file as usize]
                .bytes
                .is_none_or(|have| item.offset + item.bytes > have);
            if short {
                self.short(name, &region, item);
                continue;
            }
            let stored = open.tensor(&self.catalog, item)?;
            let sizes: Vec<u64> = region.spans().iter().map(|s| s.len()).collect();
            if (stored.element, &stored.shape) != (element, &sizes) {
                let what = format!(
                    "`{name}`: box {region} of {element} is {} {:?} in {}",
                    stored.element, stored.shape, self.catalog.files[item.file as usize].name
                );
                self.catalog.notice(ProblemKind::Dtype, what);
                continue;
            }
            boxes.push(StoredBox { region, file: item.file, offset: stored.offset, strides: stored.strides });
        }
        if let Some(start) = places.into_keys().flatten().next() {
            let what = format!(
                "`{name}`: a box that begins at {start:?} lies in a file, and its tensor does not have it"
            );
            self.catalog.notice(ProblemKind::Outside, what);
        }
        self.catalog.tensors.insert(name.into(), Tensor { element, shape, boxes, value: None });
        Ok(())
    }

    fn short(&mut self, name: &str, region: &Region, item: Item) {
        let file = &self.catalog.files[item.file as usize];
        // That a file is missing was said once.
        if let Some(have) = file.bytes {
            let end = item.offset + item.bytes;
            let what =
                format!("`{name}`: box {region} ends at byte {end} of {}, which has {have}", file.name);
            self.catalog.notice(ProblemKind::ShortFile, what);
        }
    }

    fn described(&self, value: Id) -> Option<(Element, Vec<u64>, Vec<Region>)> {
        let pickle = self.pickle;
        let properties = pickle.state(pickle.attribute(value, "properties")?)?;
        let dtype = match pickle.list(properties) {
            Some(list) => *list.first()?,
            None => pickle.get(properties, "dtype")?,
        };
        let element = Element::of_torch(pickle.global(dtype)?.1)?;
        let shape = pickle.sizes(pickle.attribute(value, "size")?)?;
        let chunks = pickle.list(pickle.attribute(value, "chunks")?)?;
        let region = |&chunk: &Id| {
            let starts = pickle.sizes(pickle.attribute(chunk, "offsets")?)?;
            let sizes = pickle.sizes(pickle.attribute(chunk, "sizes")?)?;
            (starts.len() == shape.len() && sizes.len() == shape.len()).then(|| box_at(&starts, &sizes))?
        };
        let regions = chunks.iter().map(region).collect::<Option<Vec<_>>>()?;
        Some((element, shape, regions))
    }
}

/// Files of items, each opened once, and not too many at a time.
#[derive(Default)]
struct OpenFiles {
    files: HashMap<u32, File>,
}

impl OpenFiles {
    const MAX_OPEN: usize = 256;

    fn tensor(&mut self, catalog: &Catalog, item: Item) -> Result<zip::Stored, CheckpointError> {
        let path = catalog.path(item.file);
        if !self.files.contains_key(&item.file) {
            if self.files.len() >= Self::MAX_OPEN {
                self.files.clear();
            }
            let file = File::open(&path).map_err(CheckpointError::io("open", &path))?;
            self.files.insert(item.file, file);
        }
        zip::read_tensor(&self.files[&item.file], &path, item.offset, item.bytes)
    }
}
