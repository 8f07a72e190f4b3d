//! Where a rank takes connections: a door for its host, and one for the network. And tensors' own connections: the higher
//! rank knocks.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixListener, UnixStream};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::Duration;

use crossmesh_core::id::Rank;

use super::check::UNIX_PREFIX;
use super::{Entry, RendezvousError};
use crate::auth::{self, AuthError, Claim, Role, Secret};
use crate::deadline::{Deadline, Socket, StreamError};
use crate::protect::Session;

/// A connection, and what protects it.
pub type Connection = (Socket, Session);

/// How long a knock waits before it looks whether the job is over.
const KNOCK: Duration = Duration::from_millis(500);
/// A door that hung up on us may have been crowded.
const RETRY: Duration = Duration::from_millis(20);
/// Connections that may wait to be accepted, where the system allows as many.
const BACKLOG: i32 = 4096;
/// A peer connects once for each program; more than a few at a time are a mistake.
const MAX_WAITING: usize = 8;

/// Where a rank takes connections.
#[derive(Debug)]
pub struct Doors {
    pub tcp: TcpListener,
    pub unix: UnixListener,
    pub tcp_addr: SocketAddr,
    pub unix_name: String,
}

impl Doors {
    /// Opens both; `ip` is the address that the others reach us at.
    pub fn open(ip: IpAddr, rank: Rank) -> io::Result<Self> {
        let tcp = TcpListener::bind(SocketAddr::new(ip, 0))?;
        let tcp_addr = tcp.local_addr()?;
        // A fresh name every time: tests run many ranks in one process.
        let unix_name = format!("{UNIX_PREFIX}{rank}-{}-{}", std::process::id(), tcp_addr.port());
        let unix = UnixListener::bind_addr(&UnixAddr::from_abstract_name(&unix_name)?)?;
        unix.set_nonblocking(true)?;
        rustix::net::listen(&unix, BACKLOG)?;
        make_roomy(&tcp)?;
        Ok(Self { tcp, unix, tcp_addr, unix_name })
    }
}

/// Thousands may come at once, and nobody waits for them.
pub fn make_roomy(listener: &TcpListener) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    Ok(rustix::net::listen(listener, BACKLOG)?)
}

/// Connections of other ranks, for tensors, until somebody asks for them.
#[derive(Debug, Default)]
pub struct Arrivals {
    waiting: Mutex<BTreeMap<Rank, VecDeque<Connection>>>,
    came: Condvar,
}

impl Arrivals {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<Rank, VecDeque<Connection>>> {
        self.waiting.lock().expect("no thread panics while it holds the list")
    }

    pub fn add(&self, rank: Rank, connection: Connection) {
        self.waiting().entry(rank).or_default().push_back(connection);
        self.came.notify_all();
    }

    pub fn has_room_for(&self, rank: Rank) -> bool {
        self.waiting().get(&rank).is_none_or(|sockets| sockets.len() < MAX_WAITING)
    }

    /// A connection of each of `ranks`; or those that did not come.
    pub fn take(
        &self,
        ranks: &BTreeSet<Rank>,
        deadline: Deadline,
        over: impl Fn() -> bool,
    ) -> Result<BTreeMap<Rank, Connection>, BTreeSet<Rank>> {
        let (mut there, mut waiting) = (BTreeMap::new(), self.waiting());
        loop {
            let missing: Vec<Rank> = ranks.iter().filter(|r| !there.contains_key(*r)).copied().collect();
            for rank in missing {
                let socket = waiting.get_mut(&rank).and_then(VecDeque::pop_front);
                there.extend(socket.map(|socket| (rank, socket)));
            }
            if there.len() == ranks.len() {
                return Ok(there);
            }
            let Some(left) = deadline.left().filter(|_| !over()) else {
                return Err(ranks.iter().filter(|r| !there.contains_key(*r)).copied().collect());
            };
            let waited = self.came.wait_timeout(waiting, left.min(KNOCK));
            waiting = waited.expect("no thread panics while it holds the list").0;
        }
    }
}

/// Knocks at a lower rank's door, and proves itself there. `over` says whether the job is.
pub fn knock(
    me: &Entry,
    peer: &Entry,
    secret: &Secret,
    deadline: Deadline,
    over: impl Fn() -> bool,
) -> Result<Connection, RendezvousError> {
    let local = me.host == peer.host;
    let addr = if local { format!("@{}", peer.unix) } else { peer.tcp.to_string() };
    let mut cause = "no time was left".to_string();
    while !deadline.passed() && !over() {
        match open(peer, local, deadline).and_then(|link| prove(link, me, peer, secret, deadline)) {
            Ok(link) => return Ok(link),
            // What may pass: nobody answered yet, or the door was crowded.
            Err(Failed::Again(why)) => {
                cause = why;
                std::thread::sleep(RETRY);
            }
            Err(Failed::ForGood(why)) => {
                cause = why;
                break;
            }
        }
    }
    let (me, peer, host) = (me.rank, peer.rank, peer.host.clone());
    Err(RendezvousError::CannotReachPeer { me, peer, host, addr, cause })
}

enum Failed {
    Again(String),
    ForGood(String),
}

fn open(peer: &Entry, local: bool, deadline: Deadline) -> Result<Socket, Failed> {
    let for_good = |e: io::Error| Failed::ForGood(e.to_string());
    if local {
        let addr = UnixAddr::from_abstract_name(&peer.unix).map_err(for_good)?;
        return UnixStream::connect_addr(&addr).map(Socket::Unix).map_err(for_good);
    }
    let left = deadline.left().unwrap_or(RETRY).min(KNOCK);
    let stream = TcpStream::connect_timeout(&peer.tcp, left).map_err(|e| match e.kind() {
        io::ErrorKind::ConnectionRefused => for_good(e),
        _ => Failed::Again(e.to_string()),
    })?;
    stream.set_nodelay(true).map_err(for_good)?;
    Ok(Socket::Tcp(stream))
}

fn prove(
    mut link: Socket,
    me: &Entry,
    peer: &Entry,
    secret: &Secret,
    deadline: Deadline,
) -> Result<Connection, Failed> {
    let claim = Claim { role: Role::Data, from: me.rank, to: peer.rank };
    match auth::dial(&mut link, secret, claim, deadline) {
        Ok(session) => {
            let link = link.without_timeouts().map_err(|e| Failed::ForGood(e.to_string()))?;
            Ok((link, session))
        }
        Err(error @ AuthError::Stream(StreamError::Closed)) => Err(Failed::Again(error.to_string())),
        Err(error) => Err(Failed::ForGood(error.to_string())),
    }
}
