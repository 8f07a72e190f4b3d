//! A file in place of memory: what units keep of a microbatch from F to B waits there.
//!
//! ```text
//! this thread   F unit 0 | F unit 1 | F unit 2 | ..            B unit 2 | B unit 1 | B unit 0
//! the file's               write 0  | write 1  | ..    read 2 | read 1  | read 0
//! ```
//!
//! One thread writes and reads, in the order it was asked to, so that whatever is read was written. At most [`PENDING`] units wait to be written: a slow disk
//! makes passes wait instead of filling memory. The file has no name: whatever ends the process frees it.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Units that may wait to be written, beside the one that is.
pub const PENDING: usize = 1;

/// Why something could not be put away, or not be had again.
#[derive(Debug, Clone, thiserror::Error)]
pub enum TierError {
    #[error("activations cannot be kept in {}: {cause}\nhint: train.offload names a folder that can be written to", path.display())]
    Open { path: PathBuf, cause: String },
    #[error(
        "{bytes} B of activations could not be written to {}: {cause}\nhint: make room there, name another folder with train.offload, or leave it out; the last \
         checkpoint is as it was",
        path.display()
    )]
    Write { path: PathBuf, bytes: usize, cause: String },
    #[error("{bytes} B of activations could not be read again from {}: {cause}", path.display())]
    Read { path: PathBuf, bytes: usize, cause: String },
}

/// Something that was put away.
#[derive(Debug)]
pub struct Parcel {
    at: u64,
    len: usize,
}

enum Job {
    Write(u64, Vec<u8>),
    Read(u64, usize, Sender<Result<Vec<u8>, TierError>>),
}

/// See the module.
#[derive(Debug)]
pub struct Tier {
    folder: PathBuf,
    jobs: Option<SyncSender<Job>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Bytes that wait to be written, or are being.
    waiting: AtomicU64,
    /// The most that ever were.
    most: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// The first thing that went wrong.
    failed: Option<TierError>,
    /// Unused places, by length.
    free: BTreeMap<usize, Vec<u64>>,
    end: u64,
}

impl Tier {
    /// A file in a folder, which is made where it is not there.
    pub fn open(folder: &Path) -> Result<Self, TierError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let failed =
            |cause: std::io::Error| TierError::Open { path: folder.into(), cause: cause.to_string() };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!(".activations-{}-{number}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path).map_err(failed)?;
        std::fs::remove_file(&path).map_err(failed)?;
        let (jobs, todo) = sync_channel(PENDING);
        let shared = Arc::new(Shared::default());
        let (of_thread, of_folder) = (Arc::clone(&shared), folder.to_path_buf());
        let work = move || of_thread.work(&file, &of_folder, &todo);
        let thread = std::thread::Builder::new().name("offload".into()).spawn(work).map_err(failed)?;
        Ok(Self { folder: folder.into(), jobs: Some(jobs), thread: Some(thread), shared })
    }

    /// Puts bytes away, beside whatever comes next.
    pub fn put(&self, bytes: Vec<u8>) -> Result<Parcel, TierError> {
        let len = bytes.len();
        let at = {
            let mut state = self.shared.lock();
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            let used = state.free.get_mut(&len).and_then(Vec::pop);
            used.unwrap_or_else(|| {
                state.end += len as u64;
                state.end - len as u64
            })
        };
        let waiting = self.shared.waiting.fetch_add(len as u64, Ordering::SeqCst) + len as u64;
        self.shared.most.fetch_max(waiting, Ordering::SeqCst);
        self.ask(Job::Write(at, bytes));
        Ok(Parcel { at, len })
    }

    /// Has them read, beside whatever comes next. Their place in the file is free again.
    pub fn fetch(&self, parcel: Parcel) -> Coming {
        let (sender, reply) = channel();
        self.ask(Job::Read(parcel.at, parcel.len, sender));
        // Whatever is written there next is written behind this read.
        self.discard(parcel);
        Coming { reply, folder: self.folder.clone() }
    }

    /// Nobody wants them any more.
    pub fn discard(&self, parcel: Parcel) {
        self.shared.lock().free.entry(parcel.len).or_default().push(parcel.at);
    }

    /// The most bytes that waited to be written at a time.
    pub fn most_waiting(&self) -> u64 {
        self.shared.most.load(Ordering::SeqCst)
    }

    fn ask(&self, job: Job) {
        let jobs = self.jobs.as_ref().expect("it is open until it is dropped");
        // The thread ends only when nobody can ask any more; were it gone, replies would say so.
        let _gone = jobs.send(job);
    }
}

impl Drop for Tier {
    fn drop(&mut self) {
        self.jobs = None;
        self.thread.take().map(JoinHandle::join);
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, file: &File, folder: &Path, todo: &Receiver<Job>) {
        while let Ok(job) = todo.recv() {
            match job {
                Job::Write(at, bytes) => {
                    if let Err(cause) = file.write_all_at(&bytes, at) {
                        let (path, bytes, cause) = (folder.into(), bytes.len(), cause.to_string());
                        self.lock().failed.get_or_insert(TierError::Write { path, bytes, cause });
                    }
                    self.waiting.fetch_sub(bytes.len() as u64, Ordering::SeqCst);
                }
                Job::Read(at, len, reply) => {
                    let failed = self.lock().failed.clone();
                    let result = failed.map_or_else(|| read(file, at, len, folder), Err);
                    // Whoever asked may have ended.
                    let _gone = reply.send(result);
                }
            }
        }
    }
}

fn read(file: &File, at: u64, len: usize, folder: &Path) -> Result<Vec<u8>, TierError> {
    let mut bytes = vec![0; len];
    let failed =
        |cause: std::io::Error| TierError::Read { path: folder.into(), bytes: len, cause: cause.to_string() };
    file.read_exact_at(&mut bytes, at).map_err(failed)?;
    Ok(bytes)
}

/// Bytes on their way back.
#[derive(Debug)]
pub struct Coming {
    reply: Receiver<Result<Vec<u8>, TierError>>,
    folder: PathBuf,
}

impl Coming {
    pub fn wait(self) -> Result<Vec<u8>, TierError> {
        let gone = TierError::Read { path: self.folder, bytes: 0, cause: "its thread is gone".into() };
        self.reply.recv().unwrap_or(Err(gone))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_comes_back() {
        let folder = tempfile::tempdir().unwrap();
        let tier = Tier::open(folder.path()).unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file has no name");
        let bytes = |i: usize| vec![i as u8; 1000 + i % 3];
        for round in 0..5 {
            let parcels: Vec<_> = (0..40).map(|i| tier.put(bytes(i + round)).unwrap()).collect();
            for (i, parcel) in parcels.into_iter().enumerate().rev() {
                match i % 7 {
                    0 => tier.discard(parcel),
                    _ => assert_eq!(tier.fetch(parcel).wait().unwrap(), bytes(i + round)),
                }
            }
        }
        assert!(tier.shared.lock().end <= 45 * 1002, "places are used again");
        assert!(tier.most_waiting() <= 1002 * (PENDING as u64 + 2));
    }

    #[test]
    fn a_folder_that_is_none_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Tier::open(&file.path().join("x")).unwrap_err().to_string();
        assert!(error.contains("train.offload") && error.contains("x"), "{error}");
    }
}
