//! Running a conversion: threads that read and write slabs, and what is done once all of them are.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crossmesh_core::region::Region;

use super::cast::cast;
use super::folder::Folder;
use super::journal::{Done, Journal};
use super::{Conversion, Limits, Slab, Stamp, Work};
use crate::catalog::{StoredBox, row_major};
use crate::copy::{Copy, read_exact};
use crate::crc::{Pieces, crc32};
use crate::error::CheckpointError;
use crate::hash::{Input, hash_files};
use crate::manifest::Manifest;
use crate::target::What;
use crate::zip::Shell;

/// Files of the source that are open at a time, in each thread.
const MAX_OPEN: usize = 128;
/// A file is handed to the disk while the next is written, once it has grown by so much.
const WRITE_BACK_BYTES: u64 = 64 << 20;

/// Written at once at most. For larger pieces the kernel takes larger pages of its cache, which a virtual machine may have to get from
/// its host first: 4 GiB took 6 to 14 s in pieces of 8 MiB, and 3 to 5 s in these, as `cp` does.
const WRITE_BYTES: usize = 256 << 10;

/// How a conversion runs.
pub struct RunOptions<'a> {
    /// Of all buffers together.
    pub max_memory: u64,
    /// How many cores are used.
    pub threads: usize,
    /// Called now and then, from any thread.
    pub progress: Option<&'a (dyn Fn(Progress) + Sync)>,
    /// Set from outside to stop it. What was written stays, as after a kill, and is gone on from.
    pub stop: Option<&'a AtomicBool>,
}

impl Default for RunOptions<'_> {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        Self { max_memory: 1 << 30, threads, progress: None, stop: None }
    }
}

/// How far it is: all of it once everything is written and synchronised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub bytes_done: u64,
    /// Of all files of the target, headers and what lies beside the tensors too.
    pub bytes: u64,
}

/// What was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    pub tensors: usize,
    pub files: usize,
    /// Of the source: tensors, what is none, what lies beside, and files whose hashes were compared.
    pub bytes_read: u64,
    /// All files, those of an earlier start too.
    pub bytes_written: u64,
    /// Of the target, for the hashes that its manifest has.
    pub bytes_read_again: u64,
    /// What an earlier start had written already.
    pub bytes_kept: u64,
}

impl Conversion {
    /// Writes the target: complete, or not there. What a killed run has written is gone on from.
    pub fn run(&self, target: &Path, options: &RunOptions<'_>) -> Result<Report, CheckpointError> {
        let limits = Limits::new(options.max_memory, options.threads)?;
        let folder = Folder::new(target)?;
        folder.has_room(self.bytes() + self.bytes_beside())?;
        let hashed = self.catalog.verify(&self.catalog.all_files(), options.threads)?;
        let slabs = self.slabs(limits.buffer_bytes);
        let files: Vec<(&str, u64)> = self.target.files.iter().map(|f| (f.name.as_str(), f.bytes)).collect();
        let (journal, done) = folder.begin(&self.identity(limits), slabs.len(), &files)?;
        // Until the folder has its name, or is gone.
        let _lock = journal.lock()?;
        let result = Run::new(self, &folder, limits, options, slabs, journal, done)
            .inspect(|run| {
                run.bytes_read.fetch_add(hashed, Ordering::Relaxed);
            })
            .and_then(Run::finish)
            .and_then(|report| folder.finish().map(|()| report));
        match result {
            // As a kill leaves it.
            Err(CheckpointError::Stopped { .. }) | Ok(_) => {}
            Err(_) => folder.remove(),
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
                    What::Manifest(manifest) => format!("{} {}", part.at, manifest.to_text()),
                    What::Box { tensor, region, .. } => {
                        format!("{} {tensor} {region} {:?}", part.at, self.elements_of(tensor))
                    }
                    What::Object { file, offset, bytes } => format!("{} {file} {offset} {bytes}", part.at),
                });
            }
        }
        for (name, tensor) in &self.catalog.tensors {
            add(format!("{name} {:?} {:?}", tensor.shape, tensor.value));
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
        self.not_stopped()?;
        let bytes_read_again = self.frames()?;
        let beside = self.beside()?;
        self.not_stopped()?;
        self.conversion.catalog.unchanged(&self.conversion.catalog.all_files())?;
        for out in &self.outs {
            out.open()?.sync_all().map_err(CheckpointError::io("synchronise", &out.path))?;
        }
        self.tell(self.bytes());
        let files = &self.conversion.target.files;
        Ok(Report {
            tensors: self.conversion.catalog.tensors.len(),
            files: files.len() + self.conversion.target.extras.len(),
            bytes_read: self.bytes_read.load(Ordering::Relaxed) + beside,
            bytes_written: self.conversion.bytes() + beside,
            bytes_read_again,
            bytes_kept: self.bytes_kept,
        })
    }

    /// Everything that is no tensor: headers, and the zip files around boxes, with the checksums of what was written. Returns the bytes
    /// that were read again for hashes.
    fn frames(&self) -> Result<u64, CheckpointError> {
        let done = self.done.lock().expect("nobody panics with it");
        // What the slabs of a part add makes its checksum, in any order.
        let mut sums: HashMap<(u32, u32), u32> = HashMap::new();
        for (slab, crc) in self.slabs.iter().zip(done.iter()) {
            let crc = crc.expect("every slab was written, or there was a failure");
            *sums.entry((slab.file, slab.part)).or_default() ^= crc;
        }
        let mut read_again = 0;
        for (i, file) in self.conversion.target.files.iter().enumerate() {
            let out = &self.outs[i];
            let opened = out.open()?;
            for (p, part) in file.parts.iter().enumerate() {
                match &part.what {
                    What::Bytes(bytes) => out.write(&opened, part.at, bytes)?,
                    // Its own file is behind all others.
                    What::Manifest(manifest) => {
                        let text = self.sealed(manifest)?;
                        read_again += manifest.files.iter().map(|f| f.bytes).sum::<u64>();
                        out.write(&opened, part.at, text.as_bytes())?;
                    }
                    What::Box { region, tensor, head_bytes: Some(_) } => {
                        let shape: Vec<u64> = region.spans().iter().map(|s| s.len()).collect();
                        let shell = Shell::of_tensor(self.conversion.elements_of(tensor).1, &shape);
                        out.write(&opened, part.at, &shell.head)?;
                        let crc = sums.get(&(i as u32, p as u32)).copied().unwrap_or_else(|| crc32(&[]));
                        let bytes = region.volume() * self.conversion.elements_of(tensor).1.bytes();
                        out.write(&opened, part.data_at() + bytes, &shell.tail(crc))?;
                    }
                    _ => {}
                }
            }
        }
        Ok(read_again)
    }

    /// The manifest with the hashes of the files that were written.
    fn sealed(&self, manifest: &Manifest) -> Result<String, CheckpointError> {
        let mut manifest = manifest.clone();
        for (entry, out) in manifest.files.iter_mut().zip(&self.outs) {
            let file = File::open(&out.path).map_err(CheckpointError::io("open", &out.path))?;
            let input = Input { file: &file, path: &out.path, bytes: entry.bytes };
            let hash = hash_files(&[input], self.limits.threads)?.remove(0);
            entry.blake3 = hash.to_hex().to_string();
        }
        Ok(manifest.to_text())
    }

    /// What lies beside the tensors, as it was when this was planned; its bytes.
    fn beside(&self) -> Result<u64, CheckpointError> {
        let mut bytes = 0;
        for ((name, from), planned) in self.conversion.extras().iter().zip(&self.conversion.beside) {
            let to = self.folder.path().join(name);
            let copied = std::fs::copy(from, &to).map_err(CheckpointError::io("copy", from))?;
            if Stamp::of(from)? != *planned || copied != planned.bytes {
                return Err(CheckpointError::Changed { path: from.clone() });
            }
            bytes += copied;
            let file = File::open(&to).map_err(CheckpointError::io("open", &to))?;
            file.sync_all().map_err(CheckpointError::io("synchronise", &to))?;
        }
        Ok(bytes)
    }

    fn not_stopped(&self) -> Result<(), CheckpointError> {
        match self.options.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            true => Err(CheckpointError::Stopped { partial: self.folder.partial().to_path_buf() }),
            false => Ok(()),
        }
    }

    /// All that is to be written.
    fn bytes(&self) -> u64 {
        self.conversion.bytes() + self.conversion.bytes_beside()
    }

    fn tell(&self, bytes_done: u64) {
        if let Some(progress) = self.options.progress {
            progress(Progress { bytes_done, bytes: self.bytes() });
        }
    }
}

impl Out {
    fn open(&self) -> Result<File, CheckpointError> {
        File::options().write(true).open(&self.path).map_err(CheckpointError::io("write", &self.path))
    }

    fn write(&self, file: &File, at: u64, bytes: &[u8]) -> Result<(), CheckpointError> {
        for (i, piece) in bytes.chunks(WRITE_BYTES).enumerate() {
            let at = at + (i * WRITE_BYTES) as u64;
            file.write_all_at(piece, at).map_err(CheckpointError::io("write", &self.path))?;
        }
        Ok(())
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
            let filled = self.fill(slab)?;
            let out = &run.outs[slab.file as usize];
            let opened = self.target(slab.file)?;
            let crc = self.write(out, &opened, &filled)?;
            run.journal.lock().expect("nobody panics with it").wrote(number, crc)?;
            run.done.lock().expect("nobody panics with it")[number] = Some(crc);
            out.write_back(&opened, filled.len as u64);
            let done = run.bytes_done.fetch_add(filled.len as u64, Ordering::Relaxed) + filled.len as u64;
            run.tell(done);
        }
    }

    fn bytes(&self, filled: &Filled) -> &[u8] {
        let buffer = if filled.rounded { &self.rounded } else { &self.slab };
        &buffer[..filled.len]
    }

    /// Writes what a buffer holds, and says what that adds to the checksum of its part.
    fn write(&self, out: &Out, file: &File, filled: &Filled) -> Result<u32, CheckpointError> {
        let bytes = self.bytes(filled);
        let (copy, checked) = match &filled.place {
            Place::Stretch(at) => return out.write(file, *at, bytes).map(|()| 0),
            Place::Box { copy, checked } => (copy, checked),
        };
        let mut pieces = Pieces::default();
        copy.each_run(&mut |at, from, len| {
            let run = &bytes[from as usize..(from + len) as usize];
            if let Some(part) = checked {
                pieces.add(at - part.start, run);
            }
            out.write(file, at, run)
        })?;
        Ok(checked.as_ref().map_or(0, |part| pieces.ending(part.end - part.start)))
    }

    /// Reads a slab, and says where in the file it goes.
    fn fill(&mut self, slab: &Slab) -> Result<Filled, CheckpointError> {
        let part = self.run.part(slab);
        match (&slab.what, &part.what) {
            (Work::Box(region), What::Box { tensor, region: whole, head_bytes }) => {
                let (from, to) = self.run.conversion.elements_of(tensor);
                self.read_box(tensor, region, from.bytes())?;
                let len = (region.volume() * to.bytes()) as usize;
                if from != to {
                    self.rounded.resize(len, 0);
                    let bytes = (region.volume() * from.bytes()) as usize;
                    cast(from, &self.slab[..bytes], to, &mut self.rounded);
                }
                let held = StoredBox::packed(whole.clone(), slab.file, part.data_at(), to);
                let strides = row_major(region.spans().iter().map(|s| s.len()), to.bytes());
                let copy = Copy::new(&held, region, &strides, region, to.bytes());
                let checked =
                    head_bytes.map(|_| part.data_at()..part.data_at() + whole.volume() * to.bytes());
                Ok(Filled { len, rounded: from != to, place: Place::Box { copy, checked } })
            }
            (Work::Object(range), What::Object { file, offset, .. }) => {
                let len = (range.end - range.start) as usize;
                self.slab.resize(len.max(self.slab.len()), 0);
                let (source, path) = self.source(*file)?;
                read_exact(&source, &path, &mut self.slab[..len], offset + range.start)?;
                self.run.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
                Ok(Filled { len, rounded: false, place: Place::Stretch(part.at + range.start) })
            }
            _ => unreachable!("slabs are made from their parts"),
        }
    }

    fn read_box(&mut self, tensor: &str, region: &Region, width: u64) -> Result<(), CheckpointError> {
        let len = (region.volume() * width) as usize;
        self.slab.resize(len.max(self.slab.len()), 0);
        if let Some(value) = &self.run.conversion.catalog.tensors[tensor].value {
            self.slab[..len].copy_from_slice(value);
            return Ok(());
        }
        for (file, copy) in self.run.conversion.copies(tensor, region) {
            let (file, path) = self.source(file)?;
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
    place: Place,
}

/// Where it goes in its file.
enum Place {
    Stretch(u64),
    /// A box, whose checksum is that of the bytes of its part, where it is needed.
    Box {
        copy: Copy,
        checked: Option<Range<u64>>,
    },
}
