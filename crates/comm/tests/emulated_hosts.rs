//! Emulated hosts: shaped, full duplex, with cables to cut, and gone afterwards. They need root.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use crossmesh_comm::lab::emulate::{Emulation, NicRate, remove_stale};
use crossmesh_comm::transport::tcp::tune;
use crossmesh_testkit::machine::{inside, namespaces_of, needs_root};

const PATIENCE: Duration = Duration::from_secs(10);

fn rate(mbit: f64) -> NicRate {
    NicRate { out_bytes_per_s: mbit * 1e6 / 8.0, in_bytes_per_s: mbit * 1e6 / 8.0 }
}

/// Connected sockets on host 0 and host 1.
fn joined(emulation: &Emulation) -> (TcpStream, TcpStream) {
    let listener = inside(&emulation.namespace(0), || TcpListener::bind((Emulation::address(0), 0)).unwrap());
    let addr = listener.local_addr().unwrap();
    let dialed = inside(&emulation.namespace(1), || TcpStream::connect_timeout(&addr, PATIENCE).unwrap());
    let accepted = listener.accept().unwrap().0;
    for socket in [&accepted, &dialed] {
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    (accepted, dialed)
}

/// Sends `bytes` both ways at once; the seconds until all have arrived.
#[expect(clippy::disallowed_methods, reason = "a test of real time")]
fn exchange(a: &TcpStream, b: &TcpStream, bytes: usize) -> f64 {
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (from, to) in [(a, b), (b, a)] {
            let (mut from, mut to) = (from, to);
            scope.spawn(move || from.write_all(&vec![7; bytes]).unwrap());
            scope.spawn(move || to.read_exact(&mut vec![0; bytes]).unwrap());
        }
    });
    start.elapsed().as_secs_f64()
}

#[test]
fn a_nic_carries_its_rate_both_ways_at_once() {
    needs_root();
    let emulation = Emulation::up(&[rate(400.0), rate(400.0)]).unwrap();
    let (a, b) = joined(&emulation);
    // One way after the other would take twice as long. The best of some: a busy machine may disturb any of them.
    let mut best = f64::INFINITY;
    for _ in 0..12 {
        best = best.min(exchange(&a, &b, 10_000_000) / (10e6 / 50e6));
        if best < 1.8 {
            break;
        }
    }
    assert!((0.9..1.8).contains(&best), "{best} × the time at the full rate");
    emulation.set_rate(1, NicRate { in_bytes_per_s: 12.5e6, ..rate(400.0) }).unwrap();
    let over = exchange(&a, &b, 5_000_000) / (5e6 / 12.5e6);
    assert!(over >= 0.9, "{over} × the time of the slower direction");
}

#[test]
fn hosts_are_alike_on_every_machine() {
    needs_root();
    let emulation = Emulation::up(&[rate(400.0), rate(400.0)]).unwrap();
    let (a, b) = joined(&emulation);
    for socket in [&a, &b] {
        assert_eq!(rustix::net::sockopt::tcp_congestion(socket).unwrap(), "cubic");
    }
}

#[test]
fn a_cut_cable_carries_nothing_until_it_is_healed() {
    needs_root();
    let emulation = Emulation::up(&[rate(400.0), rate(400.0)]).unwrap();
    let (mut a, mut b) = joined(&emulation);
    emulation.cut(1).unwrap();
    a.write_all(b"hello").unwrap();
    b.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    let silence = b.read(&mut [0; 5]).unwrap_err().kind();
    assert!(matches!(silence, ErrorKind::WouldBlock | ErrorKind::TimedOut), "{silence}");
    emulation.heal(1).unwrap();
    b.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut heard = [0; 5];
    b.read_exact(&mut heard).unwrap();
    assert_eq!(&heard, b"hello");
}

/// Left alone, a connection tries again after twice as long each time: after a cut of six seconds it would be silent for
/// another four. Only a kernel that knows the option can do better, from 6.15 on.
#[test]
#[expect(clippy::disallowed_methods, reason = "a test of real time")]
fn a_connection_goes_on_soon_after_its_cable_is_back() {
    needs_root();
    let emulation = Emulation::up(&[rate(400.0), rate(400.0)]).unwrap();
    let (mut a, mut b) = joined(&emulation);
    [&a, &b].into_iter().for_each(|socket| tune(socket).unwrap());
    exchange(&a, &b, 100_000);
    emulation.cut(1).unwrap();
    a.write_all(b"hello").unwrap();
    std::thread::sleep(Duration::from_secs(6));
    emulation.heal(1).unwrap();
    let healed = Instant::now();
    b.read_exact(&mut [0; 5]).unwrap();
    let silent = healed.elapsed().as_secs_f64();
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse::<u32>().unwrap_or(0));
    if (numbers.next(), numbers.next()) >= (Some(6), Some(15)) {
        assert!(silent < 2.0, "{silent:.1} s after the cable was back");
    }
}

#[test]
fn nothing_stays_behind() {
    needs_root();
    let emulation = Emulation::up(&[rate(400.0), rate(100.0), rate(10.0)]).unwrap();
    let prefix = format!("{emulation}-");
    let ours = || namespaces_of(std::process::id()).into_iter().filter(|n| n.starts_with(&prefix)).count();
    assert_eq!(ours(), 4);
    drop(emulation);
    assert_eq!(ours(), 0);
}

#[test]
fn what_a_killed_process_left_is_removed_by_the_next() {
    needs_root();
    let mut dead = Command::new("true").spawn().unwrap();
    let pid = dead.id();
    dead.wait().unwrap();
    let name = format!("xm{pid}.0-h0");
    assert!(Command::new("ip").args(["netns", "add", &name]).status().unwrap().success());
    assert_eq!(namespaces_of(pid), [name]);
    remove_stale();
    assert_eq!(namespaces_of(pid), Vec::<String>::new());
}
