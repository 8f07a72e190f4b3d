//! What a launcher leaves behind when it is killed, somebody else has to clear away: a shell that does nothing but wait
//! for the launcher's end.
//!
//! ```text
//! launcher ── group 4711, folder /tmp/crossmesh-run-x, netns xm4711.0-h0 ──▶ janitor
//!          ── gone group 4711 ──▶
//!          (dies) ── end of the pipe ──▶ kills the groups, removes folders and namespaces that are left
//! ```
//!
//! The ranks themselves end with the launcher by the kernel's hand ([`super::Job`]); what they started is in their groups.

use std::fmt;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::{Mutex, OnceLock};

/// Names hold no blanks or signs that a shell would read otherwise; see [`Kept::is_plain`].
const SCRIPT: &str = r#"trap '' HUP INT QUIT TERM
all=" "
while read -r word kind name; do
  case $word in
    keep) all="$all$kind:$name " ;;
    gone) case "$all" in *" $kind:$name "*) all="${all%%" $kind:$name "*} ${all#*" $kind:$name "}" ;; esac ;;
  esac
done
for one in $all; do
  name=${one#*:}
  case $one in
    group:*) kill -KILL "-$name" ;;
    folder:*) rm -rf -- "$name" ;;
    netns:*) ip netns del "$name" & ;;
  esac
done >/dev/null 2>&1
wait
"#;

/// Something that has to end, or to go, with this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kept {
    /// A process group.
    Group(u32),
    /// A folder that is ours alone.
    Folder(String),
    /// A network namespace.
    Namespace(String),
}

impl Kept {
    /// Only what a shell takes as it is; other folders stay behind.
    fn is_plain(&self) -> bool {
        let plain = |text: &str| {
            let kept = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
            !text.is_empty() && text.chars().all(kept)
        };
        match self {
            Kept::Group(number) => *number > 1,
            Kept::Folder(path) => plain(path) && path.contains("crossmesh"),
            Kept::Namespace(name) => plain(name) && name.starts_with("xm"),
        }
    }
}

impl fmt::Display for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Kept::Group(number) => write!(f, "group {number}"),
            Kept::Folder(path) => write!(f, "folder {path}"),
            Kept::Namespace(name) => write!(f, "netns {name}"),
        }
    }
}

/// While this value exists, and this process does not end it properly, somebody looks after it.
#[derive(Debug)]
#[must_use = "what is kept is let go when this is dropped"]
pub struct Keeping(Kept);

/// Has something cleared away should this process be killed.
pub fn keep(kept: Kept) -> Keeping {
    if kept.is_plain() {
        say(&format!("keep {kept}\n"));
    }
    Keeping(kept)
}

impl Drop for Keeping {
    fn drop(&mut self) {
        if self.0.is_plain() {
            say(&format!("gone {}\n", self.0));
        }
    }
}

/// Tells the janitor, who is started by the first word. Without one (no shell, no processes left) a launcher that is
/// killed leaves what it left before; the job itself is not worse off.
fn say(line: &str) {
    static JANITOR: OnceLock<Option<Mutex<ChildStdin>>> = OnceLock::new();
    if let Some(pipe) = JANITOR.get_or_init(|| start().map(Mutex::new)) {
        let mut pipe = pipe.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let _ = pipe.write_all(line.as_bytes());
    }
}

/// In a group of its own: what ends the launcher's must not end it.
fn start() -> Option<ChildStdin> {
    let mut command = Command::new("sh");
    command.args(["-c", SCRIPT]).process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().ok()?.stdin.take()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crossmesh_testkit::machine::{alive, eventually};

    use super::*;

    const SOON: Duration = Duration::from_secs(10);

    /// A janitor of the test's own, and a process group to look after.
    fn janitor() -> (std::process::Child, std::process::Child) {
        let mut command = Command::new("sh");
        let janitor = command.args(["-c", SCRIPT]).stdin(Stdio::piped()).spawn().unwrap();
        let kept = Command::new("sh").args(["-c", "sleep 60 & wait"]).process_group(0).spawn().unwrap();
        (janitor, kept)
    }

    #[test]
    fn what_is_left_goes_with_its_keeper() {
        let (mut janitor, mut kept) = janitor();
        let folder = std::env::temp_dir().join(format!("crossmesh-janitor-{}", kept.id()));
        std::fs::create_dir_all(folder.join("inside")).unwrap();
        let mut pipe = janitor.stdin.take().unwrap();
        let lines =
            format!("keep {}\nkeep {}\n", Kept::Group(kept.id()), Kept::Folder(folder.display().to_string()));
        pipe.write_all(lines.as_bytes()).unwrap();
        drop(pipe);
        janitor.wait().unwrap();
        assert!(eventually(SOON, || !alive(kept.id())) && !folder.exists());
        kept.wait().unwrap();
    }

    #[test]
    fn what_was_let_go_stays() {
        let (mut janitor, mut kept) = janitor();
        let mut pipe = janitor.stdin.take().unwrap();
        let group = Kept::Group(kept.id());
        pipe.write_all(format!("keep {group}\nkeep group 999999\ngone {group}\n").as_bytes()).unwrap();
        drop(pipe);
        janitor.wait().unwrap();
        assert!(alive(kept.id()));
        let pid = rustix::process::Pid::from_child(&kept);
        rustix::process::kill_process_group(pid, rustix::process::Signal::KILL).unwrap();
        kept.wait().unwrap();
    }

    #[test]
    fn nothing_else_is_ever_cleared_away() {
        for kept in [
            Kept::Group(0),
            Kept::Group(1),
            Kept::Folder("/home".into()),
            Kept::Folder("/tmp/crossmesh $(x)".into()),
            Kept::Namespace("production".into()),
            Kept::Namespace("xm; reboot".into()),
        ] {
            assert!(!kept.is_plain(), "{kept}");
        }
    }
}
