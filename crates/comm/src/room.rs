//! How much memory a process can still have. Shared memory is taken when a rank starts, all of it: where it does not fit,
//! that is an error with numbers, and not a signal in the middle of a run.

use std::io;
use std::path::{Path, PathBuf};

use crossmesh_core::units::Bytes;

/// A bound on memory, and where it comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Room {
    bytes: u64,
    of: String,
}

/// Refuses what can only end with the system killing somebody.
pub fn check_room(bytes: u64) -> io::Result<()> {
    match tightest().filter(|room| room.bytes < bytes) {
        None => Ok(()),
        Some(Room { bytes: left, of }) => {
            let text = format!("{} are needed, and {of} has {} left", Bytes(bytes), Bytes(left));
            Err(io::Error::new(io::ErrorKind::OutOfMemory, text))
        }
    }
}

fn tightest() -> Option<Room> {
    let machine = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| of_machine(&text));
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = group_folders(&groups).into_iter().filter_map(|folder| of_group(&folder));
    group.chain(machine).min_by_key(|room| room.bytes)
}

/// What the machine can give without killing anybody.
fn of_machine(meminfo: &str) -> Option<Room> {
    let kib = |key: &str| {
        let line = meminfo.lines().find(|line| line.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let bytes = (kib("MemAvailable:")? + kib("SwapFree:").unwrap_or(0)) << 10;
    Some(Room { bytes, of: "this machine".into() })
}

/// Where the limits of our control groups are, as both versions of them put it.
fn group_folders(groups: &str) -> Vec<PathBuf> {
    let folder = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let root = match controllers {
            "" => "/sys/fs/cgroup",
            "memory" => "/sys/fs/cgroup/memory",
            _ => return None,
        };
        Some(Path::new(root).join(path.trim_start_matches('/')))
    };
    groups.lines().filter_map(folder).collect()
}

fn of_group(folder: &Path) -> Option<Room> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    let limit = read("memory.max").or_else(|| read("memory.limit_in_bytes"))?;
    let usage = read("memory.current").or_else(|| read("memory.usage_in_bytes"))?;
    let bytes = group_room(&limit, &usage, &read("memory.stat").unwrap_or_default())?;
    Some(Room { bytes, of: format!("the control group {}", folder.display()) })
}

/// What a limit leaves. Files that the system only keeps at hand give way.
fn group_room(limit: &str, usage: &str, stat: &str) -> Option<u64> {
    // No limit is the word `max`, or a number that no machine has.
    let limit: u64 = limit.trim().parse().ok()?;
    let usage: u64 = usage.trim().parse().ok()?;
    let kept = |key: &str| {
        let line = stat.lines().find_map(|line| line.strip_prefix(key)?.trim().parse::<u64>().ok());
        line.unwrap_or(0)
    };
    Some(limit.saturating_sub(usage.saturating_sub(kept("inactive_file ") + kept("active_file "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_has_what_is_available_and_its_swap() {
        let text = "MemTotal: 9 kB\nMemAvailable:    2048 kB\nSwapFree:  1024 kB\n";
        assert_eq!(of_machine(text).unwrap().bytes, 3 << 20);
        assert_eq!(of_machine("MemTotal: 9 kB\n"), None);
    }

    #[test]
    fn a_group_leaves_its_limit_less_what_is_in_use() {
        let stat = "cache 900\ninactive_file 300\nactive_file 100\n";
        assert_eq!(group_room("1000\n", "800\n", stat), Some(600));
        assert_eq!(group_room("1000\n", "5000\n", ""), Some(0));
        assert_eq!(group_room("max\n", "800\n", ""), None);
    }

    #[test]
    fn groups_of_both_versions_are_found() {
        let lines = "9:cpu:/a\n4:memory:/jobs/7\n0::/slice\n";
        let folders = group_folders(lines);
        assert_eq!(folders, ["/sys/fs/cgroup/memory/jobs/7", "/sys/fs/cgroup/slice"].map(PathBuf::from));
    }

    #[test]
    fn what_no_machine_has_is_refused_with_numbers() {
        assert!(check_room(1).is_ok());
        let error = check_room(1 << 60).unwrap_err().to_string();
        assert!(error.starts_with("1024 PiB are needed, and "), "{error}");
    }
}
