//! Running a conversion: threads that read and write slabs, and what is done once all of them are.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crossmesh_core::region::Region;

use super::cast::cast;
use super::folder::Folder;
use super::journal::{Done, Journal};
use super::{Conversion, Limits, Slab, Work};
use crate::catalog::{modified, row_major};
use crate::copy::{Copy, read_exact};
use crate::error::CheckpointError;
use crate::target::What;
use crate::zip::{Shell, crc32, crc32_of_both};

/// Files of the source that are open at a time, in each thread.
const MAX_OPEN: usize = 128;
/// A file is handed to the disk while the next is written, once it has grown by so much.
const WRITE_BACK_BYTES: u64 = 64 << 20;

/// How a conversion runs.
pub struct RunOptions<'a> {
    /// Of all buffers together.
    pub max_memory: u64,
    /// How many cores are used.
    pub threads: usize,
    /// Called now and then, from any thread.
    pub progress: Option<&'a (dyn Fn(Progress) + Sync)>,
    /// Set from outside to stop it: nothing is left then.
    pub stop: Option<&'a AtomicBool>,
}

impl Default for RunOptions<'_> {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self { max_memory: 1 << 30, threads, progress: None, stop: None }
    }
}

/// How far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub bytes_done: u64,
    pub bytes: u64,
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    pub tensors: usize,
    pub files: usize,
    pub bytes_read: u64,
    pub bytes_written: u64,
    /// What an earlier start had written already.
    pub bytes_kept: u64,
}

impl Conversion {
    /// Writes the target: complete, or not there. What a killed run has written is gone on from.
    pub fn run(&self, target: &Path, options: &RunOptions<'_>) -> Result<Report, CheckpointError> {
        let limits = Limits::new(options.max_memory, options.threads)?;
        let folder = Folder::new(target)?;
        folder.has_room(self.bytes())?;
        let slabs = self.slabs(limits.buffer_bytes);
        let files: Vec<(&str, u64)> = self.target.files.iter().map(|f| (f.name.as_str(), f.bytes)).collect();
        let (journal, done) = folder.begin(&self.identity(limits), slabs.len(), &files)?;
        let result = Run::new(self, &folder, limits, options, slabs, journal, done)
            .and_then(Run::finish)
            .and_then(|report| folder.finish().map(|()| report));
        if result.is_err() {
            folder.remove();
        }
        result
    }

    /// Of this very conversion: of these files, with these options.
    fn identity(&self, limits: Limits) -> [u8; 32] {
        let mut hasher = blake3::Hasher::new();
        let mut add = |text: String| {
            hasher.update(&(text.len() as u64).to_le_bytes());
            hasher.update(text.as_bytes());
        };
        add(format!("{:?} {:?} {limits:?}", self.catalog.folder, self.spec.format));
        for file in &self.catalog.files {
            add(format!("{file:?}"));
        }
        for out in &self.target.files {
            add(format!("{} {}", out.name, out.bytes));
            for part in &out.parts {
                add(match &part.what {
                    What::Bytes(bytes) => format!("{} {}", part.at, blake3::hash(bytes)),
                    What::Box { tensor, region, .. } => {
                        format!("{} {tensor} {region} {:?}", part.at, self.elements_of(tensor))
                    }
                    What::Object { file, offset, bytes } => format!("{} {file} {offset} {bytes}", part.at),
                });
            }
        }
        for (name, tensor) in &self.catalog.tensors {
            add(format!("{name} {:?}", tensor.shape));
            tensor
                .boxes
                .iter()
                .for_each(|b| add(format!("{} {} {:?} {}", b.file, b.offset, b.strides, b.region)));
        }
        *hasher.finalize().as_bytes()
    }
}

/// A file of the target while it is written. Threads open it themselves: there may be more files than can be open.
struct Out {
    path: PathBuf,
    /// Since it was last handed to the disk.
    written: AtomicU64,
}

struct Run<'a> {
    conversion: &'a Conversion,
    folder: &'a Folder,
    limits: Limits,
    options: &'a RunOptions<'a>,
    slabs: Vec<Slab>,
    outs: Vec<Out>,
    journal: Mutex<Journal>,
    done: Mutex<Done>,
    next: AtomicUsize,
    bytes_read: AtomicU64,
    bytes_done: AtomicU64,
    bytes_kept: u64,
    failure: Mutex<Option<CheckpointError>>,
}

impl<'a> Run<'a> {
    fn new(
        conversion: &'a Conversion,
        folder: &'a Folder,
        limits: Limits,
        options: &'a RunOptions<'a>,
        slabs: Vec<Slab>,
        journal: Journal,
        done: Done,
    ) -> Result<Self, CheckpointError> {
        let open = |file: &crate::target::OutFile| {
            let path = folder.make_file(&file.name, file.bytes)?;
            Ok(Out { path, written: AtomicU64::new(0) })
        };
        let outs = conversion.target.files.iter().map(open).collect::<Result<Vec<_>, CheckpointError>>()?;
        let mut run = Self {
            conversion,
            folder,
            limits,
            options,
            slabs,
            outs,
            journal: Mutex::new(journal),
            done: Mutex::new(done),
            next: AtomicUsize::new(0),
            bytes_read: AtomicU64::new(0),
            bytes_done: AtomicU64::new(0),
            bytes_kept: 0,
            failure: Mutex::new(None),
        };
        let kept = |(slab, done): (&Slab, &Option<u32>)| done.map_or(0, |_| run.bytes_of(slab));
        let done = run.done.lock().expect("nobody panics with it");
        let bytes_kept = run.slabs.iter().zip(done.iter()).map(kept).sum();
        drop(done);
        run.bytes_kept = bytes_kept;
        run.bytes_done = AtomicU64::new(bytes_kept);
        Ok(run)
    }

    fn part(&self, slab: &Slab) -> &'a crate::target::Part {
        &self.conversion.target.files[slab.file as usize].parts[slab.part as usize]
    }

    /// As it is written.
    fn bytes_of(&self, slab: &Slab) -> u64 {
        match (&slab.what, &self.part(slab).what) {
            (Work::Box(region), What::Box { tensor, .. }) => {
                region.volume() * self.conversion.elements_of(tensor).1.bytes()
            }
            (Work::Object(range), _) => range.end - range.start,
            _ => 0,
        }
    }

    fn finish(self) -> Result<Report, CheckpointError> {
        std::thread::scope(|scope| {
            for _ in 0..self.limits.threads {
                scope.spawn(|| {
                    if let Err(error) = Worker::new(&self).work() {
                        let mut failure = self.failure.lock().expect("nobody panics with it");
                        failure.get_or_insert(error);
                        // The others see that there is nothing left.
                        self.next.store(self.slabs.len(), Ordering::Relaxed);
                    }
                });
            }
        });
        if let Some(error) = self.failure.lock().expect("nobody panics with it").take() {
            return Err(error);
        }
        if self.options.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(CheckpointError::target("the conversion was stopped; nothing was kept of it"));
        }
        self.frames()?;
        self.extras()?;
        self.unchanged()?;
        for out in &self.outs {
            out.open()?.sync_all().map_err(CheckpointError::io("synchronise", &out.path))?;
        }
        let files = &self.conversion.target.files;
        Ok(Report {
            tensors: self.conversion.catalog.tensors.len(),
            files: files.len() + self.conversion.target.extras.len(),
            bytes_read: self.bytes_read.load(Ordering::Relaxed),
            bytes_written: self.conversion.bytes(),
            bytes_kept: self.bytes_kept,
        })
    }

    /// Everything that is no tensor: headers, and the zip files around boxes, with the checksums of what was written.
    fn frames(&self) -> Result<(), CheckpointError> {
        let done = self.done.lock().expect("nobody panics with it");
        // Checksums of a part's slabs, in their order, make that of the part.
        let mut sums: HashMap<(u32, u32), u32> = HashMap::new();
        for (slab, crc) in self.slabs.iter().zip(done.iter()) {
            let crc = crc.expect("every slab was written, or there was a failure");
            let sum = sums.entry((slab.file, slab.part)).or_insert_with(|| crc32(&[]));
            *sum = crc32_of_both(*sum, crc, self.bytes_of(slab));
        }
        for (i, file) in self.conversion.target.files.iter().enumerate() {
            let out = &self.outs[i];
            let opened = out.open()?;
            for (p, part) in file.parts.iter().enumerate() {
                match &part.what {
                    What::Bytes(bytes) => out.write(&opened, part.at, bytes)?,
                    What::Box { region, tensor, head_bytes: Some(_) } => {
                        let shape: Vec<u64> = region.spans().iter().map(|s| s.len()).collect();
                        let shell = Shell::of_tensor(self.conversion.elements_of(tensor).1, &shape);
                        out.write(&opened, part.at, &shell.head)?;
                        let crc = sums.get(&(i as u32, p as u32)).copied().unwrap_or(crc32(&[]));
                        let bytes = region.volume() * self.conversion.elements_of(tensor).1.bytes();
                        out.write(&opened, part.data_at() + bytes, &shell.tail(crc))?;
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    fn extras(&self) -> Result<(), CheckpointError> {
        for (name, from) in self.conversion.extras() {
            let to = self.folder.path().join(name);
            std::fs::copy(&from, &to).map_err(CheckpointError::io("copy", &from))?;
            let file = File::open(&to).map_err(CheckpointError::io("open", &to))?;
            file.sync_all().map_err(CheckpointError::io("synchronise", &to))?;
        }
        Ok(())
    }

    /// What was read is what was opened.
    fn unchanged(&self) -> Result<(), CheckpointError> {
        let catalog = &self.conversion.catalog;
        for (i, file) in catalog.files.iter().enumerate() {
            let path = catalog.path(i as u32);
            let meta = std::fs::metadata(&path).map_err(CheckpointError::io("read", &path))?;
            if (Some(meta.len()), modified(&meta)) != (file.bytes, file.modified) {
                return Err(CheckpointError::Changed { path });
            }
        }
        Ok(())
    }
}

impl Out {
    fn open(&self) -> Result<File, CheckpointError> {
        File::options().write(true).open(&self.path).map_err(CheckpointError::io("write", &self.path))
    }

    fn write(&self, file: &File, at: u64, bytes: &[u8]) -> Result<(), CheckpointError> {
        file.write_all_at(bytes, at).map_err(CheckpointError::io("write", &self.path))
    }

    /// Asks the disk to begin while there is more to write; that it cannot is no failure.
    fn write_back(&self, file: &File, bytes: u64) {
        let before = self.written.fetch_add(bytes, Ordering::Relaxed);
        if before / WRITE_BACK_BYTES != (before + bytes) / WRITE_BACK_BYTES {
            start_write_back(file);
        }
    }
}

/// Without waiting for it.
#[expect(unsafe_code, reason = "rustix has no name for sync_file_range")]
fn start_write_back(file: &File) {
    use std::os::fd::AsRawFd;
    // SAFETY: the descriptor is open for as long as the borrow, and the call touches no memory of ours.
    let _ = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

/// A thread: its buffers and open files.
struct Worker<'r, 'a> {
    run: &'r Run<'a>,
    slab: Vec<u8>,
    scratch: Vec<u8>,
    rounded: Vec<u8>,
    open: HashMap<u32, (Arc<File>, PathBuf)>,
    outs: HashMap<u32, Arc<File>>,
}

impl<'r, 'a> Worker<'r, 'a> {
    fn new(run: &'r Run<'a>) -> Self {
        let scratch = vec![0; run.limits.buffer_bytes as usize];
        Self { run, slab: vec![], scratch, rounded: vec![], open: HashMap::new(), outs: HashMap::new() }
    }

    fn work(&mut self) -> Result<(), CheckpointError> {
        let run = self.run;
        loop {
            let number = run.next.fetch_add(1, Ordering::Relaxed);
            let Some(slab) = run.slabs.get(number) else { return Ok(()) };
            if run.options.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
                return Ok(());
            }
            if run.done.lock().expect("nobody panics with it")[number].is_some() {
                continue;
            }
            let (at, bytes) = self.fill(slab)?;
            let crc = if bytes.zipped { crc32(self.bytes(&bytes)) } else { 0 };
            let out = &run.outs[slab.file as usize];
            let opened = self.target(slab.file)?;
            out.write(&opened, at, self.bytes(&bytes))?;
            run.journal.lock().expect("nobody panics with it").wrote(number, crc)?;
            run.done.lock().expect("nobody panics with it")[number] = Some(crc);
            out.write_back(&opened, bytes.len as u64);
            let done = run.bytes_done.fetch_add(bytes.len as u64, Ordering::Relaxed) + bytes.len as u64;
            if let Some(progress) = run.options.progress {
                progress(Progress { bytes_done: done, bytes: run.conversion.bytes() });
            }
        }
    }

    fn bytes(&self, filled: &Filled) -> &[u8] {
        let buffer = if filled.rounded { &self.rounded } else { &self.slab };
        &buffer[..filled.len]
    }

    /// Reads a slab, and says where in the file it goes.
    fn fill(&mut self, slab: &Slab) -> Result<(u64, Filled), CheckpointError> {
        let part = self.run.part(slab);
        match (&slab.what, &part.what) {
            (Work::Box(region), What::Box { tensor, region: whole, head_bytes }) => {
                let (from, to) = self.run.conversion.elements_of(tensor);
                self.read_box(tensor, region, from.bytes())?;
                let mut filled = Filled {
                    len: (region.volume() * to.bytes()) as usize,
                    rounded: false,
                    zipped: head_bytes.is_some(),
                };
                if from != to {
                    self.rounded.resize(filled.len, 0);
                    let bytes = (region.volume() * from.bytes()) as usize;
                    cast(from, &self.slab[..bytes], to, &mut self.rounded);
                    filled.rounded = true;
                }
                let strides = row_major(whole.spans().iter().map(|s| s.len()), to.bytes());
                let starts = region.spans().iter().zip(whole.spans()).map(|(r, w)| r.start - w.start);
                let at = starts.zip(strides).map(|(x, stride)| x * stride).sum::<u64>();
                Ok((part.data_at() + at, filled))
            }
            (Work::Object(range), What::Object { file, offset, .. }) => {
                let len = (range.end - range.start) as usize;
                self.slab.resize(len.max(self.slab.len()), 0);
                let (source, path) = self.source(*file)?;
                read_exact(&source, &path, &mut self.slab[..len], offset + range.start)?;
                self.run.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
                Ok((part.at + range.start, Filled { len, rounded: false, zipped: false }))
            }
            _ => unreachable!("slabs are made from their parts"),
        }
    }

    fn read_box(&mut self, tensor: &str, region: &Region, width: u64) -> Result<(), CheckpointError> {
        let len = (region.volume() * width) as usize;
        self.slab.resize(len.max(self.slab.len()), 0);
        let strides = row_major(region.spans().iter().map(|s| s.len()), width);
        for (stored, common) in self.run.conversion.sources(tensor, region) {
            let copy = Copy::new(stored, region, &strides, &common, width);
            let (file, path) = self.source(stored.file)?;
            let read = copy.read(&file, &path, &mut self.slab[..len], &mut self.scratch)?;
            self.run.bytes_read.fetch_add(read, Ordering::Relaxed);
        }
        Ok(())
    }

    fn target(&mut self, file: u32) -> Result<Arc<File>, CheckpointError> {
        if let Some(opened) = self.outs.get(&file) {
            return Ok(opened.clone());
        }
        if self.outs.len() >= MAX_OPEN {
            self.outs.clear();
        }
        let opened = Arc::new(self.run.outs[file as usize].open()?);
        self.outs.insert(file, opened.clone());
        Ok(opened)
    }

    fn source(&mut self, file: u32) -> Result<(Arc<File>, PathBuf), CheckpointError> {
        if let Some((file, path)) = self.open.get(&file) {
            return Ok((file.clone(), path.clone()));
        }
        if self.open.len() >= MAX_OPEN {
            self.open.clear();
        }
        let path = self.run.conversion.catalog.path(file);
        let opened = Arc::new(File::open(&path).map_err(CheckpointError::io("open", &path))?);
        self.open.insert(file, (opened.clone(), path.clone()));
        Ok((opened, path))
    }
}

/// What a buffer holds.
struct Filled {
    len: usize,
    /// In the buffer of rounded numbers.
    rounded: bool,
    /// Its checksum is needed.
    zipped: bool,
}
