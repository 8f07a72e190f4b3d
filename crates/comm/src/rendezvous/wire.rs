//! A connection of the reactor's: never waits, first proves itself, then carries messages.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixStream};

use crossmesh_core::id::Rank;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, connect, ipproto, send, socket_with, sockopt,
};

use super::Entry;
use super::guard::Guard;
use super::message::{Reach, Say};
use crate::auth::{Answering, AuthError, Claim, Dialing, Refusal, Role, Secret};
use crate::deadline::Socket;
use crate::protect::Session;
use crate::transport::tcp;

/// What is read before others get their turn.
const READ_BYTES: usize = 16 << 10;

/// How far a connection is.
#[derive(Debug)]
enum Phase {
    Connecting,
    Dialing(Dialing),
    Answering(Answering),
    Open,
}

/// What came of a connection's turn.
#[derive(Debug)]
pub enum Turn {
    /// Nothing to speak of.
    On,
    /// Both sides have proven themselves; the claim, if it is the other side's.
    Proven(Option<(Claim, Session)>),
    Said(Vec<Say>),
    /// The other side closed it, after these words.
    Closed(Vec<Say>),
    /// It said what nobody says.
    Nonsense(String),
    /// A handshake failed.
    Refused(AuthError),
    /// A dial did not get through.
    Failed(Reach),
}

#[derive(Debug)]
pub struct Wire {
    socket: Socket,
    phase: Phase,
    /// Where both sides protect what they say, once they have proven themselves.
    guard: Option<Guard>,
    /// Where we dial: whom, and as what.
    pub dialed: Option<(Entry, Role)>,
    input: Vec<u8>,
    output: Vec<u8>,
    /// When its dial or handshake has to be over, while it is under way.
    pub by_ns: u64,
    /// It closes once all is written.
    pub closing: bool,
    pub watches_write: bool,
}

impl Wire {
    /// Somebody came.
    pub fn accepted(socket: Socket, secret: &Secret, by_ns: u64) -> std::io::Result<Self> {
        Self::new(socket, Phase::Answering(Answering::new(secret)), None, by_ns)
    }

    /// One that has proven itself before.
    pub fn proven(socket: Socket, session: &Session) -> std::io::Result<Self> {
        let mut wire = Self::new(socket, Phase::Open, None, u64::MAX)?;
        wire.protect(session);
        Ok(wire)
    }

    /// Begins to dial: inside a host over a Unix socket, else over TCP.
    pub fn dial(host: &str, to: &Entry, role: Role, by_ns: u64) -> Result<Self, Reach> {
        let socket = match to.host == host && !to.unix.is_empty() {
            true => Socket::Unix(dial_unix(&to.unix)?),
            false => Socket::Tcp(dial_tcp(to.tcp)?),
        };
        let wire = Self::new(socket, Phase::Connecting, Some((to.clone(), role)), by_ns);
        wire.map_err(|_| Reach::Unreachable)
    }

    fn new(socket: Socket, phase: Phase, dialed: Option<(Entry, Role)>, by_ns: u64) -> std::io::Result<Self> {
        ioctl_fionbio(&socket, true)?;
        if let Socket::Tcp(stream) = &socket {
            // Words are few: without this, one that was lost in a long cut would be sent again two minutes later.
            tcp::tune(stream)?;
            tcp::hurry(stream);
        }
        let (input, output) = Default::default();
        let watches_write = false;
        let guard = None;
        Ok(Self { socket, phase, guard, dialed, input, output, by_ns, closing: false, watches_write })
    }

    /// From now on words are protected as both sides agreed; what is said inside a host passes nobody.
    fn protect(&mut self, session: &Session) {
        if matches!(self.socket, Socket::Tcp(_)) {
            self.guard = Guard::new(session);
        }
    }

    pub fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    pub fn peer_name(&self) -> String {
        crate::deadline::Stream::peer_name(&self.socket)
    }

    /// Of one that takes no more bytes: whether it was closed on this side. The other has its end open.
    pub fn is_closed_here(&self) -> bool {
        let ends = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut state = [PollFd::new(&self.socket, ends)];
        let looked = poll(&mut state, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        looked.is_ok() && !state[0].revents().intersects(ends)
    }

    /// Whether our own end was shut: the system says so before it looks at what is sent. Inside a host an end that the other
    /// side has closed looks the same.
    pub fn is_shut_here(&self) -> bool {
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        matches!(send(&self.socket, &[], flags), Err(Errno::PIPE))
    }

    pub fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open)
    }

    pub fn is_connecting(&self) -> bool {
        matches!(self.phase, Phase::Connecting)
    }

    pub fn wants_write(&self) -> bool {
        !self.output.is_empty() || matches!(self.phase, Phase::Connecting)
    }

    /// What a dial that takes too long says about the other side.
    pub fn reach_so_far(&self) -> Reach {
        if matches!(self.phase, Phase::Connecting) { Reach::Unreachable } else { Reach::Mute }
    }

    /// The socket, for tensors. Nothing may have come on it that was not taken.
    pub fn into_socket(self) -> Option<Socket> {
        (self.input.is_empty() && self.output.is_empty()).then_some(self.socket)
    }

    pub fn send(&mut self, say: &Say) {
        let bytes = say.to_bytes();
        match &mut self.guard {
            Some(guard) => guard.seal(&bytes, &mut self.output),
            None => self.output.extend_from_slice(&bytes),
        }
    }

    /// Writes what can be written; false if the connection is gone.
    pub fn flush(&mut self) -> bool {
        while !self.output.is_empty() {
            match self.socket.write(&self.output) {
                Ok(0) => return false,
                Ok(written) => drop(self.output.drain(..written)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
        true
    }

    /// Moves on: connects, reads, proves.
    pub fn turn(&mut self, me: Rank, secret: &Secret, admit: impl Fn(Claim) -> Result<(), Refusal>) -> Turn {
        if matches!(self.phase, Phase::Connecting) {
            return self.connected(me, secret);
        }
        let open = self.read();
        let turn = match self.phase {
            Phase::Open => self.parse(),
            _ => self.prove(admit),
        };
        match (open, turn) {
            (false, Turn::On) => self.ended(vec![]),
            (false, Turn::Said(said)) => self.ended(said),
            (_, turn) => turn,
        }
    }

    fn ended(&self, said: Vec<Say>) -> Turn {
        match (&self.phase, &self.dialed) {
            (Phase::Open, _) => Turn::Closed(said),
            // Dropped unheard, perhaps for one of many strangers.
            (_, Some(_)) => Turn::Failed(Reach::Mute),
            (_, None) => Turn::Refused(crate::deadline::StreamError::Closed.into()),
        }
    }

    fn connected(&mut self, me: Rank, secret: &Secret) -> Turn {
        match sockopt::socket_error(&self.socket) {
            Ok(Ok(())) => {}
            Ok(Err(errno)) | Err(errno) => return Turn::Failed(reach_of(errno)),
        }
        let Some((to, role)) = &self.dialed else { return Turn::On };
        let claim = Claim { role: *role, from: me, to: to.rank };
        match Dialing::start(secret, claim, &mut self.output) {
            Ok(dialing) => self.phase = Phase::Dialing(dialing),
            Err(error) => return Turn::Refused(error),
        }
        if self.flush() { Turn::On } else { Turn::Failed(Reach::Mute) }
    }

    /// Reads what is there, but not more than its share; false at the end.
    fn read(&mut self) -> bool {
        let mut buffer = [0; READ_BYTES];
        loop {
            // A stranger is not read beyond what it has to say.
            let most = match &self.phase {
                Phase::Answering(answering) => answering.needs() - self.input.len(),
                _ => READ_BYTES,
            };
            match self.socket.read(&mut buffer[..most]) {
                Ok(0) => return false,
                Ok(count) => {
                    self.input.extend_from_slice(&buffer[..count]);
                    return true;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return true,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return false,
            }
        }
    }

    fn prove(&mut self, admit: impl Fn(Claim) -> Result<(), Refusal>) -> Turn {
        let (session, known) = match &mut self.phase {
            Phase::Answering(answering) if self.input.len() >= answering.needs() => {
                let bytes: Vec<u8> = self.input.drain(..answering.needs()).collect();
                match answering.take(&bytes, &mut self.output, &admit) {
                    // Connections for tensors are handed over, and protect what passes there.
                    Ok(known) => {
                        let control = known.as_ref().filter(|(claim, _)| claim.role != Role::Data);
                        (control.map(|(_, session)| session.clone()), known)
                    }
                    Err(error) => return Turn::Refused(error),
                }
            }
            Phase::Dialing(dialing) if self.input.len() >= dialing.needs() => {
                let bytes: Vec<u8> = self.input.drain(..dialing.needs()).collect();
                match dialing.take(&bytes, &mut self.output) {
                    // What is dialed here is for control.
                    Ok(session) => (session, None),
                    Err(error) => return Turn::Refused(error),
                }
            }
            _ => return Turn::On,
        };
        if session.is_some() || known.is_some() {
            session.iter().for_each(|session| self.protect(session));
            self.phase = Phase::Open;
            return Turn::Proven(known);
        }
        // More may be here already.
        self.prove(admit)
    }

    fn parse(&mut self) -> Turn {
        if let Some(Err(changed)) = self.guard.as_mut().map(|guard| guard.open(&mut self.input)) {
            return Turn::Nonsense(changed.to_string());
        }
        let words = self.guard.as_mut().map_or(&mut self.input, |guard| &mut guard.words);
        let (mut said, mut at) = (vec![], 0);
        loop {
            match Say::parse(&words[at..]) {
                Ok(Some((say, len))) => {
                    said.push(say);
                    at += len;
                }
                Ok(None) => break,
                Err(nonsense) => return Turn::Nonsense(nonsense),
            }
        }
        words.drain(..at);
        if words.is_empty() {
            // Thousands of connections would keep their largest message's room.
            *words = Vec::new();
        }
        if said.is_empty() { Turn::On } else { Turn::Said(said) }
    }

    /// What the other side said before it was gone.
    pub fn last_words(&mut self) -> Turn {
        while self.read() && self.socket_has_more() {}
        self.parse()
    }

    fn socket_has_more(&self) -> bool {
        matches!(rustix::io::ioctl_fionread(&self.socket), Ok(1..))
    }

    /// What came together with the proof.
    pub fn rest(&mut self) -> Turn {
        self.parse()
    }
}

fn reach_of(errno: Errno) -> Reach {
    match errno {
        Errno::CONNREFUSED | Errno::CONNRESET => Reach::Refused,
        Errno::AGAIN => Reach::Mute,
        _ => Reach::Unreachable,
    }
}

fn dial_unix(name: &str) -> Result<UnixStream, Reach> {
    let addr = UnixAddr::from_abstract_name(name).map_err(|_| Reach::Unreachable)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).map_err(reach_of)?;
    let name = addr.as_abstract_name().unwrap_or_default();
    let addr = rustix::net::SocketAddrUnix::new_abstract_name(name).map_err(reach_of)?;
    connect(&socket, &addr).map_err(reach_of)?;
    Ok(socket.into())
}

fn dial_tcp(to: SocketAddr) -> Result<TcpStream, Reach> {
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket: OwnedFd =
        socket_with(family, SocketType::STREAM, flags, Some(ipproto::TCP)).map_err(reach_of)?;
    match connect(&socket, &to) {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(socket.into()),
        Err(errno) => Err(reach_of(errno)),
    }
}
