//! A process on another host, by way of ssh: a command line that holds no secret, and an end when the launcher ends.
//!
//! The secret is the first line that the remote shell reads; the rest of its input never comes, and ends when ssh or
//! the launcher do. That is the sign to end the process and its group.

use std::collections::BTreeMap;
use std::ffi::OsString;

use crossmesh_core::id::Rank;

use super::{LaunchError, Process};
use crate::auth::SECRET_VARIABLE;

/// The process that starts `command` on `host` by `rsh` (`ssh -o BatchMode=yes`, say).
pub fn remote_command(
    rank: Rank,
    rsh: &[String],
    host: &str,
    env: &BTreeMap<String, String>,
    command: &[String],
) -> Result<Process, LaunchError> {
    // What reaches the host takes options, and not every such program knows `--`.
    if !host.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_' || c == '[') {
        return Err(LaunchError::BadHost(host.into()));
    }
    let exports: Vec<String> = env
        .iter()
        .filter(|(name, _)| *name != SECRET_VARIABLE)
        .map(|(name, value)| format!("{name}={}", quote(value)))
        .collect();
    let command: Vec<String> = command.iter().map(|word| quote(word)).collect();
    let script = format!(
        "IFS= read -r {SECRET_VARIABLE}; export {SECRET_VARIABLE} {}; exec 3<&0; setsid {} </dev/null 3<&- & p=$!; \
         {{ read -r _ <&3; kill -TERM -$p; sleep 2; kill -KILL -$p; }} >/dev/null 2>&1 & w=$!; \
         wait $p; c=$?; kill -KILL $w; exit $c",
        exports.join(" "),
        command.join(" "),
    );
    let words = [host.to_string(), format!("exec sh -c {}", quote(&script))];
    let words = rsh.iter().skip(1).cloned().chain(words).map(OsString::from);
    let secret = env.get(SECRET_VARIABLE).map_or("", String::as_str);
    Ok(Process {
        rank,
        program: rsh.first().map_or("ssh", String::as_str).into(),
        args: words.collect(),
        env: BTreeMap::new(),
        namespace: None,
        stdin: Some(format!("{secret}\n")),
    })
}

/// A word as a shell reads it back.
fn quote(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.into()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_a_shell() {
        assert_eq!(quote("a-b/c.d=1"), "a-b/c.d=1");
        assert_eq!(quote("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(quote(""), "''");
    }

    #[test]
    fn a_host_is_no_option() {
        for host in ["-oProxyCommand=touch /tmp/x", "--", "", " a"] {
            let error = remote_command(Rank(0), &["ssh".into()], host, &BTreeMap::new(), &[]).unwrap_err();
            assert!(error.to_string().starts_with(&format!("`{host}` is no name of a host")), "{error}");
        }
        // user@host comes as it is.
        assert!(remote_command(Rank(0), &["ssh".into()], "me@node7", &BTreeMap::new(), &[]).is_ok());
    }

    #[test]
    fn the_secret_is_in_no_argument() {
        let env = [("RANK", "3"), (SECRET_VARIABLE, "deadbeef")];
        let env = env.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        let process =
            remote_command(Rank(3), &["ssh".into()], "node7", &env, &["echo".into(), "a b".into()]).unwrap();
        let args: Vec<_> = process.args.iter().map(|a| a.to_string_lossy().into_owned()).collect();
        assert_eq!(args[0], "node7");
        assert!(args.iter().all(|arg| !arg.contains("deadbeef")), "{args:?}");
        assert_eq!(process.stdin.as_deref(), Some("deadbeef\n"));
    }
}
