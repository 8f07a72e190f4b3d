//! Files that are there whole, or as they were before: a disk may be full.

use std::io::{self, ErrorKind};
use std::path::Path;

use anyhow::{Context, Result};

/// Writes a file, or names it, the reason, and what may help.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let written = write_whole(path, text.as_bytes()).map_err(with_hint);
    written.with_context(|| format!("cannot write {}", path.display()))
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

/// What can be done about a disk that is full.
pub fn with_hint(error: io::Error) -> io::Error {
    let hint = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "make room there, or write elsewhere",
        ErrorKind::FileTooLarge => "`ulimit -f` says how large a file may be",
        _ => return error,
    };
    io::Error::new(error.kind(), format!("{error}\nhint: {hint}"))
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
    fn what_is_no_file_is_written_to_or_refused() {
        write(Path::new("/dev/null"), "gone").unwrap();
        assert!(write(Path::new("/dev/full"), "x").is_err());
        assert!(write(&std::env::temp_dir(), "x").is_err());
        assert!(write(Path::new("/no/such/folder/x"), "x").is_err());
    }
}
