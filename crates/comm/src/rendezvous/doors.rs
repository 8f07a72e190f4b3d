//! Data connections: every rank has a door for its host and one for the network; the higher rank knocks.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::mpsc::channel;
use std::time::Duration;

use crossmesh_core::id::Rank;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::lobby::{HANDSHAKE, tcp_listener, without_delay};
use super::{Entry, Log, RendezvousError};
use crate::auth::{self, Claim, Refusal, Role, Secret};
use crate::deadline::{Deadline, Socket, Stream};
use crate::protect::Session;

/// How often a waiting door looks whether it should close.
const LOOK: Duration = Duration::from_millis(20);

/// Where a rank takes data connections.
pub struct Doors {
    tcp: TcpListener,
    unix: UnixListener,
    pub tcp_addr: SocketAddr,
    pub unix_name: String,
}

impl Doors {
    /// Opens both; `ip` is the address that the others reach us at.
    pub fn open(ip: IpAddr, rank: Rank) -> io::Result<Self> {
        let tcp = tcp_listener(SocketAddr::new(ip, 0))?;
        // A fresh name every time: tests run many ranks in one process.
        let unix_name = format!("crossmesh-{rank}-{}-{}", std::process::id(), tcp.local_addr()?.port());
        let unix = UnixListener::bind_addr(&UnixAddr::from_abstract_name(&unix_name)?)?;
        unix.set_nonblocking(true)?;
        let tcp_addr = tcp.local_addr()?;
        Ok(Self { tcp, unix, tcp_addr, unix_name })
    }
}

/// A listener to accept from.
pub(super) enum Accepted<'a> {
    Tcp(&'a TcpListener),
    Unix(&'a UnixListener),
}

impl<'a> Accepted<'a> {
    pub(super) fn tcp(listener: &'a TcpListener) -> Self {
        Self::Tcp(listener)
    }

    fn accept(&self) -> io::Result<Socket> {
        match self {
            Self::Tcp(listener) => Ok(Socket::Tcp(without_delay(listener.accept()?.0)?)),
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(false)?;
                Ok(Socket::Unix(stream))
            }
        }
    }

    fn poll_fd(&self) -> PollFd<'_> {
        match self {
            Self::Tcp(listener) => PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
            Self::Unix(listener) => PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN),
        }
    }
}

/// Accepts at all of `listeners` until `done`.
pub(super) fn accept_until(
    listeners: &[Accepted<'_>],
    done: impl Fn() -> bool,
    mut take: impl FnMut(Socket),
) {
    let look = Timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as i64 };
    while !done() {
        let mut fds: Vec<PollFd<'_>> = listeners.iter().map(Accepted::poll_fd).collect();
        if !matches!(poll(&mut fds, Some(&look)), Ok(ready) if ready > 0) {
            continue;
        }
        for listener in listeners {
            match listener.accept() {
                Ok(link) => take(link),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                // Out of descriptors, say: leave the others time to close some.
                Err(_) => std::thread::sleep(LOOK / 20),
            }
        }
    }
}

/// A connection, and what protects it.
pub type Connection = (Socket, Session);

/// Connects `me` with `peers`: knocks at the lower ones, lets the higher ones in.
pub fn connect(
    me: &Entry,
    table: &BTreeMap<Rank, Entry>,
    peers: &BTreeSet<Rank>,
    doors: &Doors,
    secret: &Secret,
    deadline: Deadline,
    log: &Log,
) -> Result<BTreeMap<Rank, Connection>, RendezvousError> {
    let entries = peers.iter().map(|p| table.get(p).ok_or(RendezvousError::UnknownPeer { peer: *p }));
    let lower: Vec<&Entry> =
        entries.filter(|e| !matches!(e, Ok(e) if e.rank >= me.rank)).collect::<Result<_, _>>()?;
    let higher: BTreeSet<Rank> = peers.iter().copied().filter(|p| *p > me.rank).collect();
    std::thread::scope(|scope| {
        let letting_in = scope.spawn(|| let_in(me.rank, higher, doors, secret, deadline, log));
        let knocked: Result<Vec<(Rank, Connection)>, RendezvousError> =
            lower.iter().map(|peer| Ok((peer.rank, knock(me, peer, secret, deadline)?))).collect();
        let entered = letting_in.join().expect("letting in does not panic");
        let mut links = entered?;
        links.extend(knocked?);
        Ok(links)
    })
}

fn knock(
    me: &Entry,
    peer: &Entry,
    secret: &Secret,
    deadline: Deadline,
) -> Result<Connection, RendezvousError> {
    let local = me.host == peer.host;
    let addr = if local { format!("@{}", peer.unix) } else { peer.tcp.to_string() };
    let wrong = |cause: String| RendezvousError::CannotReachPeer {
        me: me.rank,
        peer: peer.rank,
        host: peer.host.clone(),
        addr: addr.clone(),
        cause,
    };
    let opened = if local { open_unix(&peer.unix) } else { open_tcp(peer.tcp, deadline) };
    let mut link = opened.map_err(|e| wrong(e.to_string()))?;
    let claim = Claim { role: Role::Data, from: me.rank, to: peer.rank };
    let dialed = auth::dial_session(&mut link, secret, claim, deadline);
    let session = dialed.map_err(|e| wrong(e.to_string()))?;
    Ok((link.without_timeouts()?, session))
}

fn open_unix(name: &str) -> io::Result<Socket> {
    Ok(Socket::Unix(UnixStream::connect_addr(&UnixAddr::from_abstract_name(name)?)?))
}

fn open_tcp(addr: SocketAddr, deadline: Deadline) -> io::Result<Socket> {
    let left = deadline.left().ok_or(io::ErrorKind::TimedOut)?;
    Ok(Socket::Tcp(without_delay(TcpStream::connect_timeout(&addr, left)?)?))
}

/// Lets the ranks of `expected` in, each once; turns others away.
fn let_in(
    me: Rank,
    expected: BTreeSet<Rank>,
    doors: &Doors,
    secret: &Secret,
    deadline: Deadline,
    log: &Log,
) -> Result<BTreeMap<Rank, Connection>, RendezvousError> {
    let (entered, arrivals) = channel();
    let mut links = BTreeMap::new();
    let waiting = std::sync::Mutex::new(expected);
    let still = || waiting.lock().expect("no thread panics with the list").clone();
    std::thread::scope(|scope| {
        let listeners = [Accepted::Tcp(&doors.tcp), Accepted::Unix(&doors.unix)];
        let done = || deadline.passed() || still().is_empty();
        accept_until(&listeners, done, |mut link| {
            let (entered, waiting) = (entered.clone(), &waiting);
            scope.spawn(move || {
                let address = link.peer_name();
                let deadline = deadline.or_after(HANDSHAKE);
                let answered =
                    auth::answer_session(&mut link, secret, deadline, |claim| admit(claim, me, waiting));
                match (answered, link.without_timeouts()) {
                    (Ok((claim, session)), Ok(link)) => drop(entered.send((claim.from, (link, session)))),
                    (Err(why), _) => log(&format!("{me}: turned away {address}: {why}")),
                    (_, Err(why)) => log(&format!("{me}: lost {address}: {why}")),
                }
            });
        });
    });
    drop(entered);
    links.extend(arrivals);
    let missing = still();
    if missing.is_empty() {
        return Ok(links);
    }
    Err(RendezvousError::PeersMissing { me, missing, waited_s: deadline.allowed_s() })
}

fn admit(claim: Claim, me: Rank, waiting: &std::sync::Mutex<BTreeSet<Rank>>) -> Result<(), Refusal> {
    if claim.role != Role::Data || claim.to != me {
        return Err(Refusal::WrongDoor);
    }
    let mut waiting = waiting.lock().expect("no thread panics with the list");
    if waiting.remove(&claim.from) { Ok(()) } else { Err(Refusal::DuplicateRank) }
}
