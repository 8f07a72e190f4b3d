use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::*;
use crate::auth::{self, Refusal, Secret};
use crate::deadline::{Deadline, Socket};

const SILENCE: Duration = Duration::from_secs(2);

fn within(seconds: u64) -> Deadline {
    Deadline::after(Duration::from_secs(seconds))
}

fn secret() -> Secret {
    Secret::from_text("only for these tests").unwrap()
}

/// A lobby for `n` ranks on loopback, and what it logs.
struct Place {
    port: u16,
    lobby: Lobby,
    log: Arc<Mutex<Vec<String>>>,
}

fn open(n: u32, arrive: Deadline) -> Place {
    let listener = Lobby::listen(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let lines = Arc::new(Mutex::new(Vec::new()));
    let log: Log = {
        let lines = lines.clone();
        Arc::new(move |line: &str| lines.lock().unwrap().push(line.to_string()))
    };
    let patience = Patience { arrive, silence: SILENCE, barrier: Duration::from_secs(1) };
    let lobby = Lobby::open(listener, secret(), (0..n).map(Rank).collect(), patience, log).unwrap();
    Place { port, lobby, log: lines }
}

fn join_as(
    port: u16,
    rank: u32,
    host: &str,
    secret: &Secret,
) -> Result<(Member, Doors, Receiver<Abort>), RendezvousError> {
    let (aborts, aborted) = channel();
    let (master, rank) = (("127.0.0.1", port), Rank(rank));
    let ticket = Ticket { master, rank, host, secret, deadline: within(10), silence: SILENCE };
    let on_abort: OnAbort = Box::new(move |abort, _| drop(aborts.send(abort.clone())));
    let (member, doors) = Member::join(&ticket, on_abort)?;
    Ok((member, doors, aborted))
}

/// Runs `each` as every rank, in threads.
fn everyone<T: Send>(n: u32, each: impl Fn(u32) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..n)
            .map(|rank| {
                let each = &each;
                scope.spawn(move || each(rank))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn quiet() -> Log {
    Arc::new(|_: &str| {})
}

#[test]
fn ranks_meet_connect_and_wait_for_each_other() {
    let place = open(4, within(10));
    // Ranks 0 and 1 on a host, 2 and 3 on another; a ring, and r0 with r2.
    let pairs = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)];
    everyone(4, |rank| {
        let host = format!("h{}", rank / 2);
        let (mut member, doors, _) = join_as(place.port, rank, &host, &secret()).unwrap();
        assert_eq!(member.table.len(), 4);
        let peers: BTreeSet<Rank> = pairs
            .iter()
            .filter_map(|&(a, b)| {
                if a == rank {
                    Some(Rank(b))
                } else if b == rank {
                    Some(Rank(a))
                } else {
                    None
                }
            })
            .collect();
        let links =
            connect(&member.me, &member.table, &peers, &doors, &secret(), within(10), &quiet()).unwrap();
        let mut links: BTreeMap<Rank, Socket> =
            links.into_iter().map(|(peer, (link, _))| (peer, link)).collect();
        assert_eq!(links.keys().copied().collect::<BTreeSet<_>>(), peers);
        ping(rank, &host, &member.table, &mut links);
        for _ in 0..3 {
            member.barrier(within(10)).unwrap();
            let told = member.gather(format!("word of {rank}"), within(10)).unwrap();
            let all = (0..4).map(|r| (Rank(r), format!("word of {r}"))).collect();
            assert_eq!(told, (rank == 0).then_some(all));
        }
        member.leave();
    });
    place.lobby.close();
    assert_eq!(*place.log.lock().unwrap(), Vec::<String>::new());
}

/// Everybody tells its peers its number, inside the host over a Unix socket.
fn ping(rank: u32, host: &str, table: &BTreeMap<Rank, Entry>, links: &mut BTreeMap<Rank, Socket>) {
    for (peer, link) in links.iter_mut() {
        assert_eq!(matches!(link, Socket::Unix(_)), table[peer].host == host);
        link.write_all(&rank.to_le_bytes()).unwrap();
    }
    for (peer, link) in links {
        let mut said = [0; 4];
        link.read_exact(&mut said).unwrap();
        assert_eq!(u32::from_le_bytes(said), peer.0);
    }
}

#[test]
fn missing_ranks_are_named_to_those_who_came() {
    let place = open(4, Deadline::after(Duration::from_millis(300)));
    for error in everyone(2, |rank| join_as(place.port, 2 * rank, "h0", &secret()).map(drop).unwrap_err()) {
        let error = error.to_string();
        assert!(error.contains("ranks 1, 3 did not within 0.3 s"), "{error}");
    }
}

#[test]
fn a_rank_that_dies_is_named_to_all_others() {
    let place = open(3, within(10));
    let heard = everyone(3, |rank| {
        let (mut member, _doors, aborted) =
            join_as(place.port, rank, &format!("h{rank}"), &secret()).unwrap();
        member.barrier(within(10)).unwrap();
        if rank == 1 {
            return None;
        }
        Some(aborted.recv_timeout(Duration::from_secs(2)).unwrap())
    });
    for abort in [heard[0].as_ref().unwrap(), heard[2].as_ref().unwrap()] {
        assert_eq!((abort.culprit, abort.host.as_str()), (Rank(1), "h1"));
        assert!(abort.to_string().starts_with("r1 on h1 is gone"), "{abort}");
    }
}

#[test]
fn faults_lead_to_the_one_who_says_nothing() {
    let place = open(4, within(10));
    let heard = everyone(4, |rank| {
        let (mut member, _doors, aborted) = join_as(place.port, rank, "h", &secret()).unwrap();
        member.barrier(within(10)).unwrap();
        if rank == 3 {
            // Stuck: it answers, and does not report.
            return aborted.recv_timeout(Duration::from_secs(3)).unwrap();
        }
        let fault = Fault {
            blames: Some(Rank(rank + 1)),
            hearsay: false,
            text: format!("recv from r{}, 8 B left", rank + 1),
        };
        member.fail(fault)
    });
    for abort in heard {
        assert_eq!(abort.to_string(), "r3 on h is at fault: recv from r3, 8 B left");
    }
}

/// Joins as a rank and then says nothing, as one that was stopped.
fn join_and_stop(port: u16, rank: u32) -> Socket {
    let mut link = Socket::Tcp(TcpStream::connect(("127.0.0.1", port)).unwrap());
    let claim = auth::Claim { role: auth::Role::Rendezvous, from: Rank(rank), to: Rank(rank) };
    auth::dial(&mut link, &secret(), claim, within(10)).unwrap();
    let nowhere = "127.0.0.1:1".parse().unwrap();
    let me = Entry { rank: Rank(rank), host: "h1".into(), pid: 1, tcp: nowhere, unix: String::new() };
    message::send(&mut link, &message::ToLobby::Report(me), within(10)).unwrap();
    link
}

#[test]
fn a_rank_that_does_not_answer_is_named_to_all_others() {
    let place = open(3, within(10));
    let _stopped = join_and_stop(place.port, 1);
    let heard = everyone(2, |rank| {
        let (_member, _doors, aborted) = join_as(place.port, 2 * rank, "h0", &secret()).unwrap();
        aborted.recv_timeout(SILENCE + Duration::from_secs(2)).unwrap()
    });
    for abort in heard {
        assert_eq!(abort.to_string(), "r1 on h1 does not answer; nothing was outstanding with it");
    }
}

#[test]
fn a_rank_that_keeps_the_others_waiting_at_a_barrier_is_named() {
    let place = open(3, within(10));
    let heard = everyone(3, |rank| {
        let (mut member, _doors, aborted) = join_as(place.port, rank, "h", &secret()).unwrap();
        match rank {
            2 => aborted.recv_timeout(Duration::from_secs(5)).unwrap().to_string(),
            _ => member.barrier(within(5)).unwrap_err().to_string(),
        }
    });
    let late =
        "r2 on h keeps the others waiting: rank 2 did not come to the barrier within 1.0 s of the first";
    assert_eq!(heard, [late; 3]);
}

#[test]
fn a_lobby_that_falls_silent_is_named() {
    let listener = Lobby::listen(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    // A lobby that lets r1 in, hands out the table, and is stopped.
    let lobby = std::thread::Builder::new().spawn(move || {
        listener.set_nonblocking(false).unwrap();
        let mut link = Socket::Tcp(listener.accept().unwrap().0);
        auth::answer(&mut link, &secret(), within(10), |_| Ok(())).unwrap();
        let me = message::receive(&mut link, 1 << 16, within(10)).unwrap();
        let message::ToLobby::Report(me) = me else { panic!("{me:?}") };
        let first = Entry { rank: Rank(0), host: "h9".into(), ..me.clone() };
        message::send(&mut link, &message::ToRank::Table(vec![first, me]), within(10)).unwrap();
        link
    });
    let (_member, _doors, aborted) = join_as(port, 1, "h1", &secret()).unwrap();
    let abort = aborted.recv_timeout(SILENCE + Duration::from_secs(1)).unwrap();
    assert!(
        abort.to_string().starts_with("r0 on h9 does not answer, nor the rendezvous beside it"),
        "{abort}"
    );
    drop(lobby.unwrap().join().unwrap());
}

/// Ranks of one machine have one clock: the offset is nothing, and the lobby must not be surer than it can be.
#[test]
fn a_barrier_tells_what_the_clocks_say() {
    let place = open(2, within(10));
    let clocks = everyone(2, |rank| {
        let (mut member, _doors, _) = join_as(place.port, rank, "h", &secret()).unwrap();
        // The first pings have come and gone by the second barrier.
        let clocks = [(); 2].map(|()| member.barrier(within(10)).map(|()| member.clock).unwrap());
        member.barrier(within(10)).unwrap();
        member.leave();
        clocks[1].unwrap()
    });
    for clock in clocks {
        assert!(clock.error_ns > 0 && clock.offset_ns.unsigned_abs() <= clock.error_ns, "{clock:?}");
    }
}

#[test]
fn a_lobby_that_dies_is_noticed() {
    let place = open(2, within(10));
    let joined = everyone(2, |rank| join_as(place.port, rank, "h", &secret()).unwrap());
    drop(place.lobby);
    for (_member, _doors, aborted) in joined {
        let abort = aborted.recv_timeout(Duration::from_secs(2)).unwrap();
        assert!(abort.to_string().starts_with("r0 on h is gone, and the rendezvous with it"), "{abort}");
    }
}

#[test]
fn strangers_are_turned_away_and_logged() {
    let place = open(2, within(10));
    let (port, log) = (place.port, place.log.clone());
    TcpStream::connect(("127.0.0.1", port))
        .unwrap()
        .write_all(b"GET / HTTP/1.1\r\nHost: somewhere else altogether\r\n\r\n")
        .unwrap();
    let refused = |rank: u32, secret: &Secret| match join_as(port, rank, "h", secret) {
        Err(RendezvousError::Refused { cause: crate::auth::AuthError::Refused { why, .. }, .. }) => why,
        other => panic!("{:?}", other.map(drop)),
    };
    assert_eq!(refused(0, &Secret::from_text("somebody else's secret").unwrap()), Refusal::WrongSecret);
    assert_eq!(refused(7, &secret()), Refusal::UnknownRank);
    everyone(2, |rank| {
        let (mut member, _doors, _) = join_as(port, rank, "h", &secret()).unwrap();
        member.barrier(within(10)).unwrap();
        if rank == 1 {
            assert_eq!(refused(1, &secret()), Refusal::DuplicateRank);
        }
        member.barrier(within(10)).unwrap();
        member.leave();
    });
    place.lobby.close();
    let mut reasons: Vec<String> = log
        .lock()
        .unwrap()
        .iter()
        .map(|line| line.split(": ").skip(2).collect::<Vec<_>>().join(": "))
        .collect();
    reasons.sort();
    assert_eq!(
        reasons,
        [
            "not a crossmesh process (it says GET / HT)",
            "r0: turned away: wrong secret",
            "r1: turned away: this rank is here already",
            "r7: turned away: this job has no such rank",
        ]
    );
    assert!(log.lock().unwrap()[0].starts_with("rendezvous: turned away 127.0.0.1:"));
}
