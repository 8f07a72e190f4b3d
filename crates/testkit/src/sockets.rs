//! Sockets of other processes: what is done to them, no well-behaved process would do to itself.
//!
//! A copy of a descriptor is taken out of a running process (`pidfd_getfd`, which needs root). Both are the same socket, so
//! that what is written, or shut down, here is written, or shut down, there.

use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::net::{Shutdown, SocketAddrAny, getpeername, getsockname, shutdown, sockopt};
use rustix::process::{ForeignRawFd, Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

/// A port on loopback that nobody listens at, handed out once. It is below those of outgoing connections, which might else
/// come between looking and listening.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let turn = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (17 * std::process::id() + turn) % 10_000;
        if TcpListener::bind(("127.0.0.1", port as u16)).is_ok() {
            return port as u16;
        }
    }
}

/// A connected socket that another process uses.
#[derive(Debug)]
pub struct Borrowed {
    socket: OwnedFd,
    here: SocketAddrAny,
    there: SocketAddrAny,
}

impl Borrowed {
    /// Says to the peer that nothing more comes.
    pub fn close_writing(&self) {
        shutdown(&self.socket, Shutdown::Write).expect("a connected socket can be shut down");
    }

    /// Says something in the process's place; true once all is said. A full socket takes nothing.
    pub fn say(&self, bytes: &[u8]) -> bool {
        use rustix::net::{SendFlags, send};
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        matches!(send(&self.socket, bytes, flags), Ok(sent) if sent == bytes.len())
    }

    fn port(&self) -> Option<u16> {
        std::net::SocketAddr::try_from(self.here.clone()).ok().map(|addr| addr.port())
    }

    fn remote_port(&self) -> Option<u16> {
        std::net::SocketAddr::try_from(self.there.clone()).ok().map(|addr| addr.port())
    }

    fn peer_pid(&self) -> Option<u32> {
        let credentials = sockopt::socket_peercred(self.socket.as_fd()).ok()?;
        Some(credentials.pid.as_raw_nonzero().get() as u32)
    }
}

/// The connected sockets of a process.
pub fn sockets_of(pid: u32) -> Vec<Borrowed> {
    let Some(raw) = Pid::from_raw(pid as i32) else { return vec![] };
    let Ok(process) = pidfd_open(raw, PidfdFlags::empty()) else { return vec![] };
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let numbers = entries.filter_map(|entry| {
        let target = std::fs::read_link(entry.path()).ok()?;
        let is_socket = target.to_string_lossy().starts_with("socket:");
        is_socket.then(|| entry.file_name().to_string_lossy().parse::<ForeignRawFd>().ok()).flatten()
    });
    let borrow = |number| {
        let socket = pidfd_getfd(&process, number, PidfdGetfdFlags::empty()).ok()?;
        let (here, there) = (getsockname(&socket).ok()?, getpeername(&socket).ok()??);
        Some(Borrowed { socket, here, there })
    };
    numbers.filter_map(borrow).collect()
}

/// The first process's end of its connection to the second, leaving out those at `port`, where strangers meet.
pub fn connection(from: u32, to: u32, port: u16) -> Option<Borrowed> {
    let theirs = sockets_of(to);
    let tcp = |mine: &Borrowed| {
        let meets = [mine.port(), mine.remote_port()].contains(&Some(port));
        !meets && mine.port().is_some() && theirs.iter().any(|t| t.here == mine.there && t.there == mine.here)
    };
    let local = |mine: &Borrowed| mine.port().is_none() && mine.peer_pid() == Some(to);
    sockets_of(from).into_iter().find(|mine| tcp(mine) || local(mine))
}

/// A process's end of its connection to whoever listens at `port`.
pub fn connection_to_port(from: u32, port: u16) -> Option<Borrowed> {
    sockets_of(from).into_iter().find(|mine| mine.remote_port() == Some(port))
}
