//! What the kernel is told about a TCP connection between hosts.
//!
//! Many connections share a NIC. Left alone, each of them fills the queue in front of it until packets are dropped, and a
//! drop near the end of a message costs a timeout. But a plan says who sends to whom, and a cluster how fast, so that
//! every connection can have its share of what the path and a short queue hold:
//!
//! ```text
//! 32 connections into a NIC of 50 MB/s        window = 50 MB/s / 32 × (round trip + 12 ms)
//! ```
//!
//! The receiver advertises that window. Where the share is large, as on a fast NIC, the kernel's own choice stands.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crossmesh_core::cluster::{Cluster, Topology};
use crossmesh_core::id::{HostId, Rank};
use crossmesh_core::program::{OpKind, Program};
use rustix::net::sockopt;

/// How long the queue in front of a NIC may be: long enough to bridge a process that is not scheduled for a while, short
/// enough that a switch holds it.
const QUEUE_S: f64 = 12e-3;
/// With the kernel's own bookkeeping, room for one large packet.
const MIN_WINDOW_BYTES: f64 = 12.0 * 1024.0;
/// From here on the kernel's own choice stands: it starts with about this much.
const MAX_WINDOW_BYTES: f64 = 64.0 * 1024.0;
/// The least wait before lost packets are sent again. The system's 200 ms are for the whole world; here they would be
/// seen as a third of a short transfer. What is measured of the round trip still comes on top.
const MIN_RETRANSMIT_US: i32 = 20_000;

/// The longest wait before they are sent again, however often that was in vain. By the system's own measure (two minutes) a
/// job would go on half a minute after a cable that was cut for half a minute. The least that the option takes.
const MAX_RETRANSMIT_MS: i32 = 1000;
/// For how long they are sent again at all. The system counts fifteen times, which at one a second is 14 s: a job that may wait for a cable
/// for a minute would lose its connections before. Deadlines are the engine's, and the rendezvous's.
const GIVE_UP_MS: u32 = 3_600_000;

/// The part of the NICs' rates that each pair of ranks has to itself when all that send do.
#[derive(Debug, Clone, Default)]
pub struct Shares {
    bytes_per_s: BTreeMap<(Rank, Rank), f64>,
}

impl Shares {
    pub fn of(cluster: &Cluster, topology: &Topology, program: &Program) -> Self {
        let host = |rank: Rank| topology.host(rank);
        let mut pairs: Vec<(Rank, Rank)> = vec![];
        for (rank, ops) in (0..).map(Rank).zip(&program.ranks) {
            let peers = ops.ops.iter().filter_map(|op| match op.kind {
                OpKind::Send { to, .. } if host(to) != host(rank) => Some(to),
                _ => None,
            });
            pairs.extend(peers.map(|to| (rank, to)));
        }
        pairs.sort_unstable();
        pairs.dedup();
        let (mut leaving, mut coming) = (BTreeMap::<HostId, u32>::new(), BTreeMap::<HostId, u32>::new());
        for (from, to) in &pairs {
            *leaving.entry(host(*from)).or_default() += 1;
            *coming.entry(host(*to)).or_default() += 1;
        }
        let hosts = &cluster.hosts;
        let share = |(from, to): (Rank, Rank)| {
            let out = hosts[host(from).index()].out_bytes_per_s() / f64::from(leaving[&host(from)]);
            out.min(hosts[host(to).index()].in_bytes_per_s() / f64::from(coming[&host(to)]))
        };
        Self { bytes_per_s: pairs.into_iter().map(|pair| (pair, share(pair))).collect() }
    }

    /// What comes to a rank, as [`Shares::into_rank`] says.
    pub fn to(rank: Rank, coming: impl IntoIterator<Item = (Rank, f64)>) -> Self {
        Self { bytes_per_s: coming.into_iter().map(|(from, share)| ((from, rank), share)).collect() }
    }

    /// From whom something comes to a rank over NICs, and how much may.
    pub fn into_rank(&self, rank: Rank) -> impl Iterator<Item = (Rank, f64)> {
        let coming = self.bytes_per_s.iter().filter(move |((_, to), _)| *to == rank);
        coming.map(|((from, _), share)| (*from, *share))
    }

    /// What comes from `from` to `to`, if anything does over NICs.
    pub fn bytes_per_s(&self, from: Rank, to: Rank) -> Option<f64> {
        self.bytes_per_s.get(&(from, to)).copied()
    }
}

/// Makes a connection one of many in a cluster.
pub fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    set_retransmits(stream);
    sockopt::set_tcp_user_timeout(stream, GIVE_UP_MS)?;
    leave_bbr(stream)
}

/// Words that everybody waits for do not stand in line behind tensors: not in the queue of this host's NIC, which goes by the priority of
/// a socket, nor in a switch that goes by the class of a packet (AF21, as of a terminal). Where nobody looks at either, nothing changes.
pub fn hurry(stream: &TcpStream) {
    const AF21: u8 = 18 << 2;
    /// The highest that needs no privilege, `TC_PRIO_INTERACTIVE`.
    const INTERACTIVE: i32 = 6;
    // Whichever of them the address has.
    let _v4 = sockopt::set_ip_tos(stream, AF21);
    let _v6 = sockopt::set_ipv6_tclass(stream, u32::from(AF21));
    // The class sets a priority, too, so this comes last.
    let _without = set_option(stream.as_fd(), libc::SOL_SOCKET, libc::SO_PRIORITY, INTERACTIVE);
}

/// BBR finds out a path's rate by itself. Behind a NIC that a plan shares out, with round trips of microseconds, it loses
/// track: chains fell to a third of their rate, where all others keep theirs. Any other choice of the system stands.
fn leave_bbr(stream: &TcpStream) -> io::Result<()> {
    if sockopt::tcp_congestion(stream)? == "bbr" {
        sockopt::set_tcp_congestion(stream, "cubic")?;
    }
    Ok(())
}

/// Tells the kernel how much of the path a connection's incoming bytes have to themselves.
pub fn set_window(stream: &TcpStream, share_bytes_per_s: f64) -> io::Result<()> {
    if let Some(window) = window_bytes(share_bytes_per_s, round_trip_s(stream)?) {
        sockopt::set_socket_recv_buffer_size(stream, window)?;
    }
    Ok(())
}

/// Has the system wake whoever waits for a socket when so many bytes are there: fewer where its own buffer is smaller than
/// that, or is full. Whether it does.
pub(super) fn set_wake_bytes(socket: BorrowedFd<'_>, bytes: u64) -> bool {
    set_option(socket, libc::SOL_SOCKET, libc::SO_RCVLOWAT, bytes as i32)
}

/// The window of a connection; none where the kernel chooses.
fn window_bytes(share_bytes_per_s: f64, round_trip_s: f64) -> Option<usize> {
    let bytes = (share_bytes_per_s * (round_trip_s + QUEUE_S)).max(MIN_WINDOW_BYTES);
    (bytes < MAX_WINDOW_BYTES).then_some(bytes as usize)
}

/// As the kernel saw it while the connection was made.
fn round_trip_s(stream: &TcpStream) -> io::Result<f64> {
    // SAFETY: all its fields are integers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    let into = (&raw mut info).cast();
    // SAFETY: the kernel writes at most `len` bytes to a value that has as many.
    let done =
        unsafe { libc::getsockopt(stream.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, into, &mut len) };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(f64::from(info.tcpi_rtt) * 1e-6)
}

/// How fast the kernel saw a connection deliver, at best, in bytes per second; none where it does not say (before Linux 4.9).
pub(super) fn delivery_rate(socket: BorrowedFd<'_>) -> Option<u64> {
    /// Up to `tcpi_delivery_rate` of `linux/tcp.h`; libc's struct ends before it.
    #[repr(C)]
    struct Info {
        before: [u8; 160],
        delivery_rate: u64,
    }
    let mut info = Info { before: [0; 160], delivery_rate: 0 };
    let mut len = size_of::<Info>() as libc::socklen_t;
    let into = (&raw mut info).cast();
    // SAFETY: the kernel writes at most `len` bytes to a value that has as many, all of them integers.
    let done =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, into, &mut len) };
    (done == 0 && len as usize == size_of::<Info>()).then_some(info.delivery_rate)
}

/// Kernels before 6.15 do not know these options; there a loss costs more time and nothing else.
fn set_retransmits(stream: &TcpStream) {
    /// `linux/tcp.h`; libc has no names for them yet.
    const TCP_RTO_MAX_MS: libc::c_int = 44;
    const TCP_RTO_MIN_US: libc::c_int = 45;
    for (option, value) in [(TCP_RTO_MIN_US, MIN_RETRANSMIT_US), (TCP_RTO_MAX_MS, MAX_RETRANSMIT_MS)] {
        let _unknown = set_option(stream.as_fd(), libc::IPPROTO_TCP, option, value);
    }
}

fn set_option(socket: BorrowedFd<'_>, level: libc::c_int, option: libc::c_int, value: i32) -> bool {
    let len = size_of::<i32>() as libc::socklen_t;
    let from = (&raw const value).cast();
    // SAFETY: the kernel reads `len` bytes of a value that has as many.
    let done = unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, from, len) };
    done == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::reshard::{PlanOptions, Problem, Strategy, lower, plan};

    #[test]
    fn shares_follow_the_busier_end() {
        let pair = |src: &str, dst: &str| Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
        // Two hosts of one rank each send to one host of two ranks: four pairs, two of them leave each source.
        let mut problem = pair("f32[64]@A{x:2,y:1}(x)", "f32[64]@B{z:2}(_)");
        problem.cluster.hosts[0].nic_out_bytes_per_s = 10.0;
        problem.cluster.hosts[1].nic_out_bytes_per_s = 100.0;
        problem.cluster.hosts[2].nic_in_bytes_per_s = 100.0;
        let options = PlanOptions { strategy: Strategy::SendRecv, ..PlanOptions::default() };
        let shares =
            Shares::of(&problem.cluster, &problem.topology, &lower(&plan(&problem, &options).unwrap()));
        assert_eq!(shares.bytes_per_s(Rank(0), Rank(2)), Some(5.0), "half of a slow sender");
        assert_eq!(shares.bytes_per_s(Rank(1), Rank(3)), Some(25.0), "a quarter of the receiver");
        assert_eq!(shares.bytes_per_s(Rank(2), Rank(0)), None, "nothing goes back");
        assert_eq!(shares.bytes_per_s(Rank(2), Rank(3)), None, "nothing leaves the host");
    }

    #[test]
    fn windows_are_for_narrow_shares_only() {
        assert_eq!(window_bytes(50e6 / 64.0, 0.0), Some(12 * 1024), "the least");
        assert_eq!(window_bytes(50e6 / 32.0, 0.0), Some(18_750));
        assert_eq!(window_bytes(50e6 / 32.0, 20e-3), Some(50_000), "a longer path holds more");
        assert_eq!(window_bytes(12.5e9 / 32.0, 0.0), None);
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "the other end, which is gone with the connection")]
    fn the_kernel_says_how_fast_a_connection_is() {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut out = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut into, _) = listener.accept().unwrap();
        let reader = std::thread::spawn(move || into.read_to_end(&mut vec![]).unwrap());
        out.write_all(&vec![7; 8 << 20]).unwrap();
        let rate = delivery_rate(out.as_fd()).unwrap();
        drop(out);
        assert_eq!(reader.join().unwrap(), 8 << 20);
        assert!((1_000_000..1_000_000_000_000).contains(&rate), "{rate} B/s over loopback");
    }

    #[test]
    fn words_go_before_tensors() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        hurry(&stream);
        assert_eq!(sockopt::ip_tos(&stream).unwrap(), 72);
        let (mut priority, mut len) = (0i32, size_of::<i32>() as libc::socklen_t);
        let into = (&raw mut priority).cast();
        // SAFETY: the kernel writes at most `len` bytes to a value that has as many.
        let done = unsafe {
            libc::getsockopt(stream.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PRIORITY, into, &mut len)
        };
        assert_eq!((done, priority), (0, 6));
    }

    #[test]
    fn a_live_connection_is_tuned() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        assert!((0.0..1.0).contains(&round_trip_s(&stream).unwrap()));
        tune(&stream).unwrap();
        assert!(stream.nodelay().unwrap());
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), GIVE_UP_MS, "it outlives every deadline");
        assert_ne!(sockopt::tcp_congestion(&stream).unwrap(), "bbr");
        let before = sockopt::socket_recv_buffer_size(&stream).unwrap();
        set_window(&stream, 1e12).unwrap();
        assert_eq!(sockopt::socket_recv_buffer_size(&stream).unwrap(), before);
        set_window(&stream, 1e3).unwrap();
        // The kernel doubles what it is told, for its own bookkeeping.
        assert_eq!(sockopt::socket_recv_buffer_size(&stream).unwrap(), 2 * 12 * 1024);
    }
}
