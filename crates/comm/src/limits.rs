//! How many descriptors a process may have. Every connection takes one, and so does every segment of shared memory: a rank
//! among many needs more than the 1024 that systems give by default, of which most let a process take more by itself.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Raises the limit to what the system lets this process have. Where that fails, the limit stays, and whoever runs into it
/// says so.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let _as_it_was = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

/// That there is no descriptor left, how many there are, and what to do.
pub(crate) fn no_descriptor(cause: Errno) -> io::Error {
    let most = getrlimit(Resource::Nofile).current;
    let most = most.map_or_else(|| "no limit of its own".into(), |most| format!("at most {most}"));
    let hint = "raise `ulimit -Hn`";
    io::Error::other(format!("no descriptor is left: {cause}; this process may have {most}\nhint: {hint}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_raised_to_what_there_is() {
        raise_descriptor_limit();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(limit.current, limit.maximum);
        let said = no_descriptor(Errno::MFILE).to_string();
        assert!(said.contains("no descriptor is left") && said.contains("ulimit -Hn"), "{said}");
    }
}
