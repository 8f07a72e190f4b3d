//! Files that are there whole, or as they were before: a disk may be full.

use std::borrow::Cow;
use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use anyhow::{Context, Result, bail};
use crossmesh_train::config::nearest;
use flate2::Compression;
use flate2::read::MultiGzDecoder;
use flate2::write::GzEncoder;

/// More than this in one file is taken for a mistake, or for malice: a few bytes can be made to unpack to anything.
const MAX_UNPACKED: u64 = 16 << 30;
/// What a file packed by gzip starts with.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Writes a file, or names it, the reason, and what may help. One whose name ends in `.gz` is packed.
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    let bytes = packed(path, bytes.as_ref())?;
    let written = write_whole(path, &bytes).map_err(with_hint);
    written.with_context(|| format!("cannot write {}", path.display()))
}

fn packed<'a>(path: &Path, bytes: &'a [u8]) -> Result<Cow<'a, [u8]>> {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("gz") => {
            let mut packer = GzEncoder::new(Vec::new(), Compression::default());
            packer.write_all(bytes).context("cannot pack")?;
            Ok(packer.finish().context("cannot pack")?.into())
        }
        Some(other @ ("zst" | "xz" | "bz2" | "lz4")) => {
            bail!(
                "cannot write {}: `.{other}` is not known here\nhint: files are packed by gzip: name it `.gz`",
                path.display()
            )
        }
        _ => Ok(bytes.into()),
    }
}

/// Refuses a file whose folder is not there, or that is a folder itself, before any work goes into what it would hold.
pub fn check_folder_of(path: &Path) -> Result<()> {
    if path.is_dir() {
        bail!("cannot write {}: it is a directory\nhint: name a file in it", path.display());
    }
    match path.parent().filter(|parent| !parent.as_os_str().is_empty() && !parent.is_dir()) {
        Some(parent) => bail!(
            "cannot write {}: there is no folder {}\nhint: make it (`mkdir -p {}`), or write elsewhere",
            path.display(),
            parent.display(),
            parent.display()
        ),
        None => Ok(()),
    }
}

/// A file's bytes, unpacked where they were packed, whatever its name is.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let bytes = read_whole(path).with_context(|| format!("cannot read {}", path.display()))?;
    if !bytes.starts_with(&GZIP) {
        return Ok(bytes);
    }
    let mut unpacked = Vec::new();
    let read = MultiGzDecoder::new(&bytes[..]).take(MAX_UNPACKED + 1).read_to_end(&mut unpacked);
    read.with_context(|| format!("cannot unpack {}: it is packed by gzip, and broken", path.display()))?;
    if unpacked.len() as u64 > MAX_UNPACKED {
        bail!("cannot read {}: it unpacks to more than 16 GiB", path.display());
    }
    Ok(unpacked)
}

fn read_whole(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path).map_err(|error| with_path_hint(error, path))?;
    let kind = file.metadata()?.file_type();
    if kind.is_char_device() || kind.is_block_device() {
        // Some of them never end.
        return Err(io::Error::new(
            ErrorKind::InvalidInput,
            "it is a device\nhint: name a file; `-` is stdin",
        ));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Makes a folder, and takes it for this process alone until what is returned is dropped or the process ends. `elsewhere` is a setting that
/// leads to another one.
pub fn lock_folder(folder: &Path, elsewhere: &str) -> Result<File> {
    let name = folder.display();
    let made = std::fs::create_dir_all(folder).map_err(with_hint);
    made.with_context(|| format!("cannot make the folder {name}"))?;
    let held = File::open(folder).with_context(|| format!("cannot open the folder {name}"))?;
    // A file without a name: whoever cannot write there should hear so before there is anything to write.
    tempfile::tempfile_in(folder).map_err(with_hint).with_context(|| format!("cannot write into {name}"))?;
    match held.try_lock() {
        Ok(()) => Ok(held),
        Err(TryLockError::WouldBlock) => bail!(
            "another run is writing into {name}\nhint: wait until it is over, or take another folder: --set {elsewhere}"
        ),
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("cannot lock the folder {name}"))
        }
    }
}

fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    // A pipe or a device takes what it gets; a link leads to the file that is meant.
    let target = match std::fs::metadata(path) {
        Ok(found) if !found.is_file() => return std::fs::write(path, bytes),
        Ok(_) => std::fs::canonicalize(path)?,
        Err(_) => path.to_path_buf(),
    };
    let name = target.file_name().ok_or(ErrorKind::InvalidInput)?.to_string_lossy();
    let beside = target.with_file_name(format!(".{name}.{}", std::process::id()));
    let written = std::fs::write(&beside, bytes).and_then(|()| keep_mode(&target, &beside));
    written.and_then(|()| std::fs::rename(&beside, &target)).inspect_err(|_| {
        // Half a file is of no use, and may be what fills the disk.
        let _ = std::fs::remove_file(&beside);
    })
}

fn keep_mode(old: &Path, new: &Path) -> io::Result<()> {
    match std::fs::metadata(old) {
        Ok(old) => std::fs::set_permissions(new, old.permissions()),
        Err(_) => Ok(()),
    }
}

/// What can be done about a disk that is full, or a place that is none.
pub fn with_hint(error: io::Error) -> io::Error {
    let hint = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room there, or write elsewhere",
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => "write elsewhere",
        ErrorKind::NotADirectory | ErrorKind::AlreadyExists => "a file has that name: take another one",
        ErrorKind::FileTooLarge => "`ulimit -f` says how large a file may be",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}\nhint: {hint}"))
}

/// What can be done about a path that leads nowhere: the name there that is nearly the same, or which folder is missing.
pub fn with_path_hint(error: io::Error, path: &Path) -> io::Error {
    if error.kind() != ErrorKind::NotFound {
        return error;
    }
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let hint = match (folder.is_dir(), near(folder, path)) {
        (true, Some(near)) => format!("there is {near}"),
        (true, None) => "look at the path; a relative one starts where the program was started".into(),
        (false, _) => format!("there is no folder {}", folder.display()),
    };
    io::Error::new(ErrorKind::NotFound, format!("{error}\nhint: {hint}"))
}

fn near(folder: &Path, path: &Path) -> Option<String> {
    let wanted = path.file_name()?.to_str()?;
    let mut names: Vec<String> =
        std::fs::read_dir(folder).ok()?.flatten().filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort_unstable();
    let near = nearest(wanted, names.iter().map(String::as_str))?;
    Some(path.with_file_name(near).display().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_file_is_replaced_with_its_mode_and_through_links() {
        let folder = tempfile::tempdir().unwrap();
        let (file, link) = (folder.path().join("a"), folder.path().join("b"));
        write(&file, "old").unwrap();
        std::fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        write(&link, "new").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "new");
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "nothing is left beside it");
    }

    #[test]
    fn a_name_says_whether_a_file_is_packed_and_its_bytes_do_when_it_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let text = "{\"transfers\": []}\n".repeat(10_000);
        write(&at("plan.json"), &text).unwrap();
        write(&at("plan.json.gz"), &text).unwrap();
        let bytes = |name: &str| std::fs::metadata(at(name)).unwrap().len();
        assert!(bytes("plan.json.gz") * 50 < bytes("plan.json"));
        std::fs::rename(at("plan.json.gz"), at("renamed.json")).unwrap();
        assert!(
            read(&at("plan.json")).unwrap() == text.as_bytes()
                && read(&at("renamed.json")).unwrap() == text.as_bytes()
        );
        let whole = std::fs::read(at("renamed.json")).unwrap();
        for cut in [2, 11, whole.len() / 2, whole.len() - 1] {
            std::fs::write(at("cut"), &whole[..cut]).unwrap();
            let error = format!("{:#}", read(&at("cut")).unwrap_err());
            assert!(error.contains("packed by gzip, and broken"), "{error}");
        }
        let error = write(&at("plan.json.zst"), "x").unwrap_err().to_string();
        assert!(error.contains("`.zst` is not known here"), "{error}");
    }

    #[test]
    fn a_path_that_leads_nowhere_has_a_hint() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        write(&at("gpt-mini.toml"), "x").unwrap();
        let error = |path: &Path| format!("{:#}", read(path).unwrap_err());
        let found = error(&at("gpt_mni.toml"));
        assert!(found.starts_with("cannot read ") && found.contains("/gpt_mni.toml: "), "{found}");
        assert!(found.ends_with(&format!("\nhint: there is {}", at("gpt-mini.toml").display())), "{found}");
        assert!(error(&at("other")).ends_with("a relative one starts where the program was started"));
        let found = error(&at("no/such"));
        assert!(found.ends_with(&format!("\nhint: there is no folder {}", at("no").display())), "{found}");
        assert!(error(Path::new("/dev/zero")).contains("it is a device\nhint: "));
    }

    #[test]
    fn a_folder_is_taken_by_one_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("runs/one");
        let held = lock_folder(&run, "log.folder=b").unwrap();
        let error = lock_folder(&run, "log.folder=b").unwrap_err().to_string();
        assert!(error.starts_with("another run is writing into"), "{error}");
        // Not by dropping it: a process that another test starts meanwhile has a copy of it for a moment.
        held.unlock().unwrap();
        lock_folder(&run, "log.folder=b").unwrap();
    }

    #[test]
    fn what_is_no_file_is_written_to_or_refused() {
        write(Path::new("/dev/null"), "gone").unwrap();
        assert!(write(Path::new("/dev/full"), "x").is_err());
        assert!(write(&std::env::temp_dir(), "x").is_err());
        assert!(write(Path::new("/no/such/folder/x"), "x").is_err());
    }
}
