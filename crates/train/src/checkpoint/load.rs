//! Loading on any layout: which boxes of the files are which parts of a rank's shards, checked and read.
//!
//! A shard, or the run of it that an optimizer keeps, is some boxes of a tensor, and the files hold others. Where two of them meet, bytes
//! are read:
//!
//! ```text
//! saved on tp 2     | rank 0      | rank 1      |
//! wanted on tp 3    | 0       | 1       | 2     |
//!                             ^ from both
//! ```
//!
//! No number is used before the file it comes from was found to be what was written. That costs reading every file this rank needs once, hashed on all
//! cores (768 MiB from the page cache took two cores 0.18 to 0.31 s; bench/results); each file once for a [`Checkpoint`], however much is loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use crossmesh_checkpoint::hash::{Input, hash_files};
use crossmesh_checkpoint::manifest::{BoxEntry, Facts, MANIFEST, Manifest, TensorEntry, VALUE};
use crossmesh_checkpoint::safetensors::Header;
use crossmesh_checkpoint::{BoxReader, Element, StoredBox, Want, row_major};
use crossmesh_core::dtype::DType;
use crossmesh_core::region::Region;

use super::error::CheckpointError;
use super::snapshot::fits;
use super::state::{Convert, StageTarget};
use crate::boxes;
use crate::deal::{Runs, Share};
use crate::kernels::scalar::Scalar;
use crate::parameter::Parameter;

/// A complete checkpoint, open.
#[derive(Debug)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
    /// By name and state.
    tensors: BTreeMap<(String, String), usize>,
    files: Vec<Opened>,
}

#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: File,
    bytes: u64,
    /// There once the file was found to be what was written.
    header: OnceLock<Header>,
}

/// What came of loading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Restored {
    /// Whether moments were there to be loaded. An imported model has none, and what was in the buffers is still in them.
    pub moments: bool,
    /// Bytes that were read for it, beside what was hashed.
    pub bytes_read: u64,
}

/// A box of a tensor in a file, and where it belongs.
struct Wanted<'a> {
    entry: &'a BoxEntry,
    source: Region,
    target: Region,
    /// Where the target's first element is in the buffer.
    at: usize,
}

impl Checkpoint {
    /// Opens the checkpoint in a folder: reads the manifest, and looks whether all files are there with their lengths.
    pub fn open(folder: &Path) -> Result<Self, CheckpointError> {
        let path = folder.join(MANIFEST);
        let text = std::fs::read_to_string(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => CheckpointError::NotThere { path: folder.to_path_buf() },
            std::io::ErrorKind::InvalidData => CheckpointError::damaged(&path, "it is no text"),
            _ => CheckpointError::io("read", &path)(error),
        })?;
        let manifest = Manifest::parse(&text, &path)?;
        let files = manifest.files.iter().map(|f| Opened::open(folder.join(&f.name), f.bytes));
        let files = files.collect::<Result<_, _>>()?;
        let key = |(i, t): (usize, &TensorEntry)| ((t.name.clone(), t.state.clone()), i);
        let tensors = manifest.tensors.iter().enumerate().map(key).collect();
        Ok(Self { folder: folder.to_path_buf(), manifest, tensors, files })
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn facts(&self) -> &Facts {
        &self.manifest.facts
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub fn dtype(&self) -> DType {
        self.manifest.dtype()
    }

    /// Checks the hashes of all files that have not been checked.
    pub fn verify(&self) -> Result<(), CheckpointError> {
        self.verify_files(&(0..self.files.len()).collect())
    }

    /// Fills a rank's stages: parameters, and moments where a target has room for them. Reads the boxes it needs and no others.
    pub fn load<T: Scalar>(
        &self,
        stages: &mut [StageTarget<'_, T>],
        convert: Convert,
    ) -> Result<Restored, CheckpointError> {
        self.check_dtype(T::DTYPE, convert)?;
        for stage in &*stages {
            self.check_moments(stage)?;
        }
        let with_moments = self.facts().optimizer.is_some();
        let mut bytes_read = 0;
        for stage in stages {
            let (parameters, coord) = (stage.parameters, stage.place.coord());
            bytes_read += self.fill(parameters, coord, VALUE, &stage.share.runs, stage.values)?;
            let Some(moments) = stage.moments.as_mut().filter(|_| with_moments) else { continue };
            for (name, values) in moments.names.iter().zip(&mut moments.values) {
                bytes_read += self.fill(parameters, coord, name, &moments.share.runs, values)?;
            }
        }
        Ok(Restored { moments: with_moments, bytes_read })
    }

    /// Whether its weights are those of a model: all of them, of the same shapes, and no others. A rank that loads its stages would not
    /// notice what none of them asks for.
    pub fn check_model(&self, parameters: &[Parameter]) -> Result<(), CheckpointError> {
        for parameter in parameters {
            self.shaped(&parameter.name, VALUE, parameter.layout.shape())?;
        }
        let known: BTreeSet<&str> = parameters.iter().map(|p| p.name.as_str()).collect();
        let unknown = |t: &&TensorEntry| t.state == VALUE && !known.contains(t.name.as_str());
        let left_out: Vec<&str> =
            self.manifest.tensors.iter().filter(unknown).map(|t| t.name.as_str()).collect();
        match left_out.first() {
            None => Ok(()),
            Some(first) => Err(CheckpointError::LeftOut {
                path: self.folder.clone(),
                name: first.to_string(),
                count: left_out.len(),
            }),
        }
    }

    /// A whole parameter of this shape, row-major.
    pub fn whole<T: Scalar>(
        &self,
        name: &str,
        shape: &[u64],
        convert: Convert,
    ) -> Result<Vec<T>, CheckpointError> {
        self.check_dtype(T::DTYPE, convert)?;
        let whole = Region::whole(shape);
        let mut values = vec![T::ZERO; whole.volume() as usize];
        if !values.is_empty() {
            self.copy(&meet(self.shaped(name, VALUE, shape)?, &whole, 0), &mut values)?;
        }
        Ok(values)
    }

    fn shaped(&self, name: &str, state: &str, wanted: &[u64]) -> Result<&TensorEntry, CheckpointError> {
        let tensor = self.tensor(name, state)?;
        if tensor.shape == wanted {
            return Ok(tensor);
        }
        let (path, name, found) = (self.folder.clone(), name.to_string(), tensor.shape.clone());
        Err(CheckpointError::Shape { path, name, found, wanted: wanted.to_vec() })
    }

    fn tensor(&self, name: &str, state: &str) -> Result<&TensorEntry, CheckpointError> {
        let found = self.tensors.get(&(name.to_string(), state.to_string()));
        found.map(|&i| &self.manifest.tensors[i]).ok_or_else(|| {
            // The closest thing to another spelling: a name that ends alike.
            let alike = |t: &&TensorEntry| t.name.ends_with(name) || name.ends_with(t.name.as_str());
            let near = self.manifest.tensors.iter().find(alike).map(|t| t.name.clone());
            CheckpointError::NoTensor { path: self.folder.clone(), name: name.into(), near }
        })
    }

    /// One state of a stage's parameters: `held` are the runs of the flat buffer that `values` are.
    fn fill<T: Scalar>(
        &self,
        parameters: &[Parameter],
        coord: &[u32],
        state: &str,
        held: &Runs,
        values: &mut [T],
    ) -> Result<u64, CheckpointError> {
        let mut wanted = Vec::new();
        for p in parameters {
            for (run, mut at) in held.within(&p.range) {
                let tensor = self.shaped(&p.name, state, p.layout.shape())?;
                let run = (run.start - p.range.start) as u64..(run.end - p.range.start) as u64;
                for target in boxes::of_run(&p.layout, coord, &run) {
                    wanted.extend(meet(tensor, &target, at));
                    at += target.volume() as usize;
                }
            }
        }
        self.copy(&wanted, values)
    }

    /// Reads what is wanted, once the files it is in are known to be good.
    fn copy<T: Scalar>(&self, wanted: &[Wanted<'_>], values: &mut [T]) -> Result<u64, CheckpointError> {
        self.verify_files(&wanted.iter().map(|w| w.entry.file).collect())?;
        let (mut read, mut reader) = (0, BoxReader::default());
        for w in wanted {
            let opened = &self.files[w.entry.file];
            let stored = self.stored(w.entry, &w.source)?;
            let element = Element::Of(T::DTYPE);
            let mut want = Want {
                tensor: String::new(),
                region: w.target.clone(),
                element,
                strides: row_major(w.target.spans().iter().map(|s| s.len()), element.bytes()),
                memory: bytemuck::cast_slice_mut(&mut values[w.at..w.at + w.target.volume() as usize]),
            };
            let from = (&stored, Element::Of(self.dtype()));
            read += reader.read((&opened.file, &opened.path), from, &mut want)?;
        }
        Ok(read)
    }

    /// Where a box's bytes are.
    fn stored(&self, entry: &BoxEntry, region: &Region) -> Result<StoredBox, CheckpointError> {
        let opened = &self.files[entry.file];
        let header = opened.header.get().expect("the file was checked");
        let element = Element::Of(self.dtype());
        let found = header.entries.get(&entry.key).filter(|e| e.element == element);
        let range = found.map(|e| header.range(e)).and_then(|range| {
            let width = element.bytes();
            let start = entry.at.checked_mul(width)?.checked_add(range.start)?;
            let end = region.volume().checked_mul(width)?.checked_add(start)?;
            (end <= range.end).then_some(start)
        });
        let Some(start) = range else {
            let what = format!("it has no {element} {region} under `{}`, as its manifest says", entry.key);
            return Err(CheckpointError::damaged(&opened.path, what));
        };
        Ok(StoredBox::packed(region.clone(), 0, start, element))
    }

    fn verify_files(&self, files: &BTreeSet<usize>) -> Result<(), CheckpointError> {
        let files: Vec<usize> =
            files.iter().copied().filter(|&i| self.files[i].header.get().is_none()).collect();
        let inputs: Vec<Input<'_>> = files.iter().map(|&i| self.files[i].input()).collect();
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let hashes = hash_files(&inputs, threads)?;
        for (&i, hash) in files.iter().zip(hashes) {
            self.check_hash(i, hash.to_hex().as_str())?;
            let opened = &self.files[i];
            let header = Header::read_whole(&opened.file, &opened.path)?;
            // Another thread may have been first, with the same result.
            let _ = opened.header.set(header);
        }
        Ok(())
    }

    fn check_hash(&self, file: usize, found: &str) -> Result<(), CheckpointError> {
        let wanted = &self.manifest.files[file];
        if wanted.blake3 == found {
            return Ok(());
        }
        let other = self.manifest.files.iter().find(|f| f.blake3 == found);
        let what = match other {
            Some(other) => format!("it is {}: somebody swapped them", other.name),
            None => format!("it is not what was written: its hash is {found}, not {}", wanted.blake3),
        };
        Err(CheckpointError::damaged(&self.files[file].path, what))
    }

    pub(super) fn check_dtype(&self, wanted: DType, convert: Convert) -> Result<(), CheckpointError> {
        let found = self.dtype();
        if found == wanted || convert == Convert::Yes {
            return Ok(());
        }
        Err(CheckpointError::DType { path: self.folder.clone(), found, wanted })
    }

    fn check_moments<T>(&self, stage: &StageTarget<'_, T>) -> Result<(), CheckpointError> {
        let values = stage.values.len();
        let Some(moments) = &stage.moments else {
            return fits(stage.parameters, values, &stage.share, &[], &[], &Share::whole(0));
        };
        let lens: Vec<usize> = moments.values.iter().map(|m| m.len()).collect();
        fits(stage.parameters, values, &stage.share, moments.names, &lens, &moments.share)?;
        let wanted: Vec<String> = moments.names.iter().map(|n| n.to_string()).collect();
        match &self.facts().optimizer {
            Some(o) if o.moments != wanted => {
                let (path, found) = (self.folder.clone(), o.moments.clone());
                Err(CheckpointError::Optimizer { path, found, wanted })
            }
            _ => Ok(()),
        }
    }
}

/// Where a tensor's boxes meet a target whose first element is at `at`.
fn meet<'a>(tensor: &'a TensorEntry, target: &Region, at: usize) -> Vec<Wanted<'a>> {
    let wanted = |entry: &'a BoxEntry| {
        let source = entry.region().expect("the manifest was checked");
        source.overlaps(target).then(|| Wanted { entry, source, target: target.clone(), at })
    };
    tensor.boxes.iter().filter_map(wanted).collect()
}

impl Opened {
    fn open(path: PathBuf, bytes: u64) -> Result<Self, CheckpointError> {
        let file = File::open(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => CheckpointError::damaged(&path, "it is missing"),
            _ => CheckpointError::io("open", &path)(error),
        })?;
        let found = file.metadata().map_err(CheckpointError::io("look at", &path))?.len();
        if found != bytes {
            let what = format!("it is {found} bytes long, and {bytes} were written");
            return Err(CheckpointError::damaged(&path, what));
        }
        Ok(Self { path, file, bytes, header: OnceLock::new() })
    }

    fn input(&self) -> Input<'_> {
        Input { file: &self.file, path: &self.path, bytes: self.bytes }
    }
}
