//! What a conversion would do: which boxes come from which bytes of which file, and how much is read and written at all.
//!
//! The sums are those of the run itself, slab by slab: a test holds them against what runs have counted.

use std::fmt;
use std::ops::Range;

use serde::Serialize;

use super::{Conversion, Limits, Work};
use crate::catalog::row_major;
use crate::copy::Copy;
use crate::target::What;

/// A conversion, explained. `Display` is for people, serde for programs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    pub schema: &'static str,
    pub source: String,
    pub from: &'static str,
    pub to: &'static str,
    pub tensors: usize,
    pub files: Vec<FilePlan>,
    /// What lies beside the tensors and is copied as it is.
    pub beside: Vec<Beside>,
    pub reads: Reads,
    pub writes: Writes,
    pub threads: usize,
    pub buffer_bytes: u64,
    /// Of all buffers together.
    pub memory_bytes: u64,
    /// What the target has no name or no place for.
    pub left_out: Vec<String>,
    /// The map that names change by.
    pub map: Option<String>,
}

/// A file that is to be written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FilePlan {
    pub name: String,
    pub bytes: u64,
    pub parts: Vec<PartPlan>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum PartPlan {
    Box {
        tensor: String,
        /// Start and end in every dim.
        r#box: Spans,
        at: u64,
        bytes: u64,
        dtype: &'static str,
        /// What the source has, where it is rounded.
        #[serde(skip_serializing_if = "Option::is_none")]
        rounded_from: Option<&'static str>,
        from: Vec<Piece>,
    },
    Object {
        at: u64,
        bytes: u64,
        file: String,
        start: u64,
    },
}

/// A part of a box, and the bytes of a source file between whose first and last it lies.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Piece {
    pub r#box: Spans,
    pub bytes: u64,
    pub file: String,
    pub start: u64,
    pub end: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Beside {
    pub name: String,
    pub bytes: u64,
}

/// A box as spans.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Spans(Vec<(u64, u64)>);

/// Bytes that are read of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Reads {
    /// All of them.
    pub bytes: u64,
    /// Each byte that is needed, once: no conversion can read less.
    pub least: u64,
    pub tensors: u64,
    pub objects: u64,
    pub beside: u64,
    /// Of files that say a hash of themselves, which is compared first.
    pub hashes: u64,
    /// Of the target, for the hashes that its manifest has.
    pub written_again: u64,
}

/// Bytes that are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Writes {
    /// All of them.
    pub bytes: u64,
    /// Numbers, objects and what lies beside; the rest is headers.
    pub least: u64,
    pub headers: u64,
}

impl Conversion {
    /// What a run with these limits would do.
    pub fn explain(&self, limits: Limits) -> Explanation {
        let beside = self.extras().iter().map(|(name, path)| Beside {
            name: name.clone(),
            bytes: std::fs::metadata(path).map_or(0, |meta| meta.len()),
        });
        let beside: Vec<Beside> = beside.collect();
        let (reads, writes) = self.traffic(limits, beside.iter().map(|b| b.bytes).sum());
        let file = |out: &crate::target::OutFile| FilePlan {
            name: out.name.clone(),
            bytes: out.bytes,
            parts: out.parts.iter().filter_map(|part| self.part_plan(part)).collect(),
        };
        Explanation {
            schema: "crossmesh.checkpoint-explain/1",
            source: self.catalog.folder.display().to_string(),
            from: self.catalog.format.name(),
            to: self.spec.format.name(),
            tensors: self.catalog.tensors.len(),
            files: self.target.files.iter().map(file).collect(),
            beside,
            reads,
            writes,
            threads: limits.threads,
            buffer_bytes: limits.buffer_bytes,
            memory_bytes: limits.memory_bytes(),
            left_out: self.target.left_out.clone(),
            map: None,
        }
    }

    fn part_plan(&self, part: &crate::target::Part) -> Option<PartPlan> {
        let name = |file: u32| self.catalog.files[file as usize].name.clone();
        match &part.what {
            What::Box { tensor, region, .. } => {
                let (from, to) = self.elements_of(tensor);
                let strides = row_major(region.spans().iter().map(|s| s.len()), from.bytes());
                let piece = |(stored, common): (&crate::catalog::StoredBox, _)| {
                    let copy = Copy::new(stored, region, &strides, &common, from.bytes());
                    let Range { start, end } = copy.file_range();
                    let (bytes, file) = (copy.bytes(), name(stored.file));
                    Piece { r#box: Spans::of(&common), bytes, file, start, end }
                };
                Some(PartPlan::Box {
                    tensor: tensor.clone(),
                    r#box: Spans::of(region),
                    at: part.data_at(),
                    bytes: region.volume() * to.bytes(),
                    dtype: to.name(),
                    rounded_from: (from != to).then(|| from.name()),
                    from: self.sources(tensor, region).into_iter().map(piece).collect(),
                })
            }
            What::Object { file, offset, bytes } => {
                Some(PartPlan::Object { at: part.at, bytes: *bytes, file: name(*file), start: *offset })
            }
            What::Bytes(_) | What::Manifest(_) => None,
        }
    }

    /// What a run reads and writes, slab by slab.
    fn traffic(&self, limits: Limits, beside: u64) -> (Reads, Writes) {
        let mut reads = Reads { beside, ..Reads::default() };
        let (mut numbers, mut least) = (0, 0);
        for slab in self.slabs(limits.buffer_bytes) {
            let part = &self.target.files[slab.file as usize].parts[slab.part as usize];
            match (&slab.what, &part.what) {
                (Work::Box(region), What::Box { tensor, .. }) => {
                    let (from, to) = self.elements_of(tensor);
                    reads.tensors += self.bytes_read_for(tensor, region, limits.buffer_bytes);
                    let in_file = self.catalog.tensors[tensor].value.is_none();
                    least += if in_file { region.volume() * from.bytes() } else { 0 };
                    numbers += region.volume() * to.bytes();
                }
                (Work::Object(range), _) => reads.objects += range.end - range.start,
                _ => unreachable!("slabs are made from their parts"),
            }
        }
        let hashed = self.catalog.files.iter().filter(|f| f.blake3.is_some());
        reads.hashes = hashed.map(|f| f.bytes.unwrap_or(0)).sum();
        reads.written_again = self.sealed_bytes();
        reads.bytes = reads.tensors + reads.objects + reads.beside + reads.hashes;
        reads.least = least + reads.objects + beside;
        let bytes = self.bytes() + beside;
        let needed = numbers + reads.objects + beside;
        (reads, Writes { bytes, least: needed, headers: bytes - needed })
    }

    /// Of files whose hashes the manifest of ours says.
    fn sealed_bytes(&self) -> u64 {
        let parts = self.target.files.iter().flat_map(|f| &f.parts);
        let sealed = parts.filter_map(|part| match &part.what {
            What::Manifest(manifest) => Some(manifest.files.iter().map(|f| f.bytes).sum::<u64>()),
            _ => None,
        });
        sealed.sum()
    }
}

impl Spans {
    fn of(region: &crossmesh_core::region::Region) -> Self {
        Self(region.spans().iter().map(|s| (s.start, s.end)).collect())
    }
}

impl fmt::Display for Spans {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let spans: Vec<String> = self.0.iter().map(|(start, end)| format!("{start}:{end}")).collect();
        write!(f, "[{}]", spans.join(", "))
    }
}

impl fmt::Display for PartPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PartPlan::Box { tensor, r#box, at, bytes, dtype, rounded_from, from } => {
                write!(f, "  {tensor} {box}  {bytes} B at {at}")?;
                match rounded_from {
                    Some(wider) => writeln!(f, ", {wider} rounded to {dtype}")?,
                    None => writeln!(f)?,
                }
                from.iter().try_for_each(|p| {
                    writeln!(f, "    {}  {} B of {} {}..{}", p.r#box, p.bytes, p.file, p.start, p.end)
                })
            }
            PartPlan::Object { at, bytes, file, start } => {
                writeln!(f, "  object  {bytes} B at {at}\n    {bytes} B of {file} {start}..{}", start + bytes)
            }
        }
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for file in &self.files {
            writeln!(f, "{}  {} B", file.name, file.bytes)?;
            file.parts.iter().try_for_each(|part| write!(f, "{part}"))?;
        }
        self.beside.iter().try_for_each(|b| writeln!(f, "{}  {} B, copied as it is", b.name, b.bytes))?;
        if let Some(map) = &self.map {
            writeln!(f, "names    by the map {map}")?;
        }
        if !self.left_out.is_empty() {
            writeln!(f, "left out {}, for {} has no place for them", self.left_out.join(", "), self.to)?;
        }
        let (r, w) = (&self.reads, &self.writes);
        write!(f, "reads    {} B, {} B at least: tensors {} B", r.bytes, r.least, r.tensors)?;
        for (what, bytes) in
            [("objects", r.objects), ("beside them", r.beside), ("to compare hashes", r.hashes)]
        {
            if bytes > 0 {
                write!(f, ", {what} {bytes} B")?;
            }
        }
        if r.written_again > 0 {
            write!(f, "; then {} B of what it has written, to hash them", r.written_again)?;
        }
        let files = self.files.len() + self.beside.len();
        writeln!(
            f,
            "\nwrites   {} B in {files} files, {} B at least: headers {} B\nbuffers  {} B in {} threads\n{} tensors from {} to {}: reads {}, writes {}",
            w.bytes,
            w.least,
            w.headers,
            self.memory_bytes,
            self.threads,
            self.tensors,
            self.from,
            self.to,
            ratio(r.bytes, r.least),
            ratio(w.bytes, w.least)
        )
    }
}

/// How much more than the least something is.
fn ratio(bytes: u64, least: u64) -> String {
    match least {
        0 => format!("{bytes} B"),
        _ => format!("{:.3} x the least", bytes as f64 / least as f64),
    }
}
