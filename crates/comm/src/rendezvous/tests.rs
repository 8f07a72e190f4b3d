//! Ranks that meet over real sockets, in threads.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Barrier, Mutex};
use std::time::Duration;

use crossmesh_testkit::machine::eventually;

use super::*;
use crate::auth::{Refusal, Secret};
use crate::deadline::Socket;

pub(super) const SILENCE: Duration = Duration::from_secs(2);

pub(super) fn within(seconds: u64) -> Deadline {
    Deadline::after(Duration::from_secs(seconds))
}

pub(super) fn secret() -> Secret {
    Secret::from_text("only for these tests").unwrap()
}

/// How long the first at a barrier waits for the others: no test but one means to see the end of it.
const BARRIER: Duration = Duration::from_secs(20);

fn patience(arrive: Deadline, barrier: Duration) -> Patience {
    Patience { arrive, silence: SILENCE, barrier, late: None, local_world: None }
}

/// A place to meet on loopback, for `n` ranks, and what the ranks log.
pub(super) struct Venue {
    pub n: u32,
    pub port: u16,
    pub arrive: Duration,
    pub barrier: Duration,
    pub log: Arc<Mutex<Vec<String>>>,
}

impl Venue {
    pub fn new(n: u32) -> Self {
        let port = crossmesh_testkit::sockets::free_port();
        Self { n, port, arrive: Duration::from_secs(10), barrier: BARRIER, log: Arc::default() }
    }

    fn log(&self) -> Log {
        let lines = self.log.clone();
        Arc::new(move |line: &str| lines.lock().unwrap().push(line.to_string()))
    }

    pub fn join(&self, rank: u32, host: &str) -> Result<(Member, Receiver<Abort>), RendezvousError> {
        self.join_with(rank, host, &secret())
    }

    pub fn join_with(
        &self,
        rank: u32,
        host: &str,
        secret: &Secret,
    ) -> Result<(Member, Receiver<Abort>), RendezvousError> {
        self.join_those(rank, host, secret, (0..self.n).map(Rank).collect())
    }

    fn join_those(
        &self,
        rank: u32,
        host: &str,
        secret: &Secret,
        roster: BTreeSet<Rank>,
    ) -> Result<(Member, Receiver<Abort>), RendezvousError> {
        let (aborts, aborted) = channel();
        let on_news: OnNews = Arc::new(move |news| {
            if let News::Abort(abort) = news {
                let _ = aborts.send(abort.clone());
            }
        });
        let (master, rank) = (("127.0.0.1", self.port), Rank(rank));
        let patience = patience(Deadline::after(self.arrive), self.barrier);
        let ticket = Ticket { master, rank, roster, host, secret, patience };
        Ok((Member::join(&ticket, on_news, self.log())?, aborted))
    }

    /// Runs `each` as every rank, in threads.
    fn everyone<T: Send>(&self, each: impl Fn(u32) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let start = |rank| {
                scope.spawn({
                    let each = &each;
                    move || each(rank)
                })
            };
            let threads: Vec<_> = (0..self.n).map(start).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        })
    }
}

#[test]
fn ranks_meet_connect_and_wait_for_each_other() {
    let venue = Venue::new(4);
    // Ranks 0 and 1 on a host, 2 and 3 on another; a ring, and r0 with r2.
    let pairs = [(0, 1), (1, 2), (2, 3), (0, 3), (0, 2)];
    venue.everyone(|rank| {
        let host = format!("h{}", rank / 2);
        let (mut member, _) = venue.join(rank, &host).unwrap();
        assert_eq!(member.num_hosts, 2);
        let ends = pairs.iter().flat_map(|&(a, b)| [(a, b), (b, a)]);
        let peers: BTreeSet<Rank> = ends.filter(|(a, _)| *a == rank).map(|(_, b)| Rank(b)).collect();
        let (mut links, entries) = member.connect(&peers, within(10)).unwrap();
        assert_eq!(links.keys().copied().collect::<BTreeSet<_>>(), peers);
        ping(rank, &host, &entries, &mut links);
        for _ in 0..3 {
            member.barrier(within(10)).unwrap();
            let told = member.gather(format!("word of {rank}"), within(10)).unwrap();
            let all = (0..4).map(|r| (Rank(r), format!("word of {r}"))).collect();
            assert_eq!(told, (rank == 0).then_some(all));
        }
        member.leave();
    });
    assert_eq!(*venue.log.lock().unwrap(), Vec::<String>::new());
}

/// Everybody tells its peers its number, inside the host over a Unix socket.
fn ping(rank: u32, host: &str, entries: &[Entry], links: &mut BTreeMap<Rank, Connection>) {
    for (peer, (link, _)) in links.iter_mut() {
        let entry = entries.iter().find(|entry| entry.rank == *peer).unwrap();
        assert_eq!(matches!(link, Socket::Unix(_)), entry.host == host);
        link.write_all(&rank.to_le_bytes()).unwrap();
    }
    for (peer, (link, _)) in links {
        let mut said = [0; 4];
        link.read_exact(&mut said).unwrap();
        assert_eq!(u32::from_le_bytes(said), peer.0);
    }
}

/// More than fit right under the root: the others hang under those, and connect wherever they like.
#[test]
fn many_ranks_meet_in_a_tree() {
    let venue = Venue::new(40);
    venue.everyone(|rank| {
        let (mut member, _) = venue.join(rank, &format!("h{}", rank % 3)).unwrap();
        let peers = BTreeSet::from([Rank((rank + 1) % 40), Rank((rank + 39) % 40)]);
        let (links, _) = member.connect(&peers, within(10)).unwrap();
        assert_eq!(links.len(), 2);
        member.barrier(within(10)).unwrap();
        let told = member.gather(format!("{rank}"), within(10)).unwrap();
        assert_eq!(told.map(|told| told.len()), (rank == 0).then_some(40));
        // The first answers to pings come and go meanwhile.
        (0..30).for_each(|_| member.barrier(within(10)).unwrap());
        assert!(member.clock.is_some());
        member.leave();
    });
    assert_eq!(*venue.log.lock().unwrap(), Vec::<String>::new());
}

#[test]
fn missing_ranks_are_named_to_those_who_came() {
    let venue = Venue { arrive: Duration::from_secs(3), ..Venue::new(4) };
    for error in venue.everyone(|rank| (rank % 2 == 0).then(|| venue.join(rank, "h0").map(drop).unwrap_err()))
    {
        let error = error.map(|error| error.to_string());
        assert!(error.is_none_or(|error| error.contains("ranks 1, 3 did not within 3.0 s")));
    }
}

/// Rank 0 comes late and r3 never: nobody gives up on r0 before r0 gives up on r3.
#[test]
fn a_late_root_and_a_missing_rank_make_no_innocents_guilty() {
    let venue = Venue { arrive: Duration::from_secs(6), ..Venue::new(4) };
    let said = venue.everyone(|rank| {
        if rank == 0 {
            std::thread::sleep(Duration::from_millis(1000));
        }
        (rank < 3).then(|| venue.join(rank, "h0").map(drop).unwrap_err().to_string())
    });
    for error in said.into_iter().flatten() {
        assert!(error.starts_with("r3 on an unknown host did not arrive"), "{error}");
    }
}

#[test]
fn a_rank_that_dies_is_named_to_all_others() {
    let venue = Venue::new(3);
    let heard = venue.everyone(|rank| {
        let (mut member, aborted) = venue.join(rank, &format!("h{rank}")).unwrap();
        member.barrier(within(10)).unwrap();
        (rank != 1).then(|| aborted.recv_timeout(Duration::from_secs(5)).unwrap())
    });
    for abort in heard.into_iter().flatten() {
        assert_eq!((abort.culprit, abort.host.as_str()), (Rank(1), "h1"));
        assert!(abort.to_string().starts_with("r1 on h1 is gone"), "{abort}");
    }
}

#[test]
fn a_root_that_dies_is_named_by_all_others() {
    let venue = Venue::new(4);
    let heard = venue.everyone(|rank| {
        let (mut member, aborted) = venue.join(rank, &format!("h{rank}")).unwrap();
        member.barrier(within(10)).unwrap();
        (rank != 0).then(|| aborted.recv_timeout(Duration::from_secs(5)).unwrap())
    });
    for abort in heard.into_iter().flatten() {
        assert!(abort.to_string().starts_with("r0 on h0 is gone: "), "{abort}");
    }
}

/// A failure ends a job, not the process: those who are left meet again at the same place, first without the one that
/// died, then with one in its stead.
#[test]
fn those_who_are_left_meet_again() {
    let venue = Venue::new(3);
    let all: BTreeSet<Rank> = (0..3).map(Rank).collect();
    venue.everyone(|rank| {
        let (mut member, _) = venue.join(rank, &format!("h{rank}")).unwrap();
        member.barrier(within(10)).unwrap();
        if rank == 1 {
            return;
        }
        let error = member.barrier(within(10)).unwrap_err().to_string();
        assert!(error.starts_with("r1 on h1 is gone: "), "{error}");
        drop(member);
        let left = &all - &BTreeSet::from([Rank(1)]);
        let (mut member, _) = venue.join_those(rank, &format!("h{rank}"), &secret().again(1), left).unwrap();
        let peer = Rank(2 - rank);
        assert_eq!(member.connect(&[peer].into(), within(10)).unwrap().0.len(), 1);
        member.barrier(within(10)).unwrap();
        member.leave();
        let meet = |rank: u32| {
            let host = format!("h{rank}");
            let (mut member, _) = venue.join_those(rank, &host, &secret().again(2), all.clone()).unwrap();
            let others = all.iter().copied().filter(|r| *r != Rank(rank)).collect();
            assert_eq!(member.connect(&others, within(10)).unwrap().0.len(), 2);
            member.barrier(within(10)).unwrap();
            member.leave();
        };
        std::thread::scope(|scope| {
            if rank == 2 {
                scope.spawn(|| meet(1));
            }
            meet(rank);
        });
    });
}

/// Whoever is quick finds the attempt that failed still there, and waits until it is gone.
#[test]
fn who_comes_again_first_waits_for_the_others_to_leave() {
    let venue = Venue::new(2);
    let both = BTreeSet::from([Rank(0), Rank(1)]);
    let again = |rank: u32| venue.join_those(rank, &format!("h{rank}"), &secret().again(1), both.clone());
    let (before, _) = venue.join_those(0, "h0", &secret(), [Rank(0)].into()).unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| again(1).map(|(member, _)| member.leave()));
        let refused = || venue.log.lock().unwrap().iter().any(|line| line.ends_with("wrong secret"));
        assert!(eventually(Duration::from_secs(8), refused), "it never knocked");
        drop(before);
        again(0).unwrap().0.leave();
        first.join().unwrap().unwrap();
    });
    // Who is refused to the end says why.
    let (before, _) = venue.join_those(0, "h0", &secret(), [Rank(0)].into()).unwrap();
    let hasty = Venue { arrive: Duration::from_millis(300), port: venue.port, ..Venue::new(2) };
    let error = hasty.join_those(1, "h1", &secret().again(1), both.clone()).map(drop).unwrap_err();
    assert!(error.to_string().contains("wrong secret"), "{error}");
    before.leave();
}

#[test]
fn faults_lead_to_the_one_who_says_nothing() {
    let venue = Venue::new(4);
    // The root waits a moment for other faults before it judges: all have to be there.
    let at_once = Barrier::new(4);
    let heard = venue.everyone(|rank| {
        let (mut member, aborted) = venue.join(rank, "h").unwrap();
        member.barrier(within(10)).unwrap();
        at_once.wait();
        if rank == 3 {
            // Stuck: it answers, and does not report.
            return aborted.recv_timeout(Duration::from_secs(5)).unwrap();
        }
        let text = format!("recv from r{}, 8 B left", rank + 1);
        member.fail(Fault { blames: Some(Rank(rank + 1)), hearsay: false, text })
    });
    for abort in heard {
        assert_eq!(abort.to_string(), "r3 on h is at fault: recv from r3, 8 B left");
    }
}

#[test]
fn a_rank_that_keeps_the_others_waiting_at_a_barrier_is_named() {
    let venue = Venue { barrier: Duration::from_secs(1), ..Venue::new(3) };
    let heard = venue.everyone(|rank| {
        let (mut member, aborted) = venue.join(rank, "h").unwrap();
        match rank {
            2 => aborted.recv_timeout(Duration::from_secs(8)).unwrap().to_string(),
            _ => member.barrier(within(8)).unwrap_err().to_string(),
        }
    });
    let late =
        "r2 on h keeps the others waiting: rank 2 did not come to the barrier within 1.0 s of the first";
    assert_eq!(heard, [late; 3]);
}

/// Ranks of one machine have one clock: the offset is nothing, and nobody must be surer than it can be.
#[test]
fn a_barrier_tells_what_the_clocks_say() {
    let venue = Venue::new(3);
    let clocks = venue.everyone(|rank| {
        let (mut member, _) = venue.join(rank, "h").unwrap();
        let clock = loop {
            // Until an answer to the first ping has come to everybody.
            member.barrier(within(10)).unwrap();
            let word = member.clock.is_some().to_string();
            let told = member.gather(word, within(10)).unwrap();
            if told.is_some_and(|told| told.values().all(|word| word == "true")) || rank != 0 {
                break member.clock;
            }
        };
        member.leave();
        clock
    });
    for clock in clocks.into_iter().flatten() {
        assert!(clock.offset_ns.unsigned_abs() <= clock.error_ns, "{clock:?}");
    }
}

#[test]
fn a_root_that_nobody_opens_is_named() {
    let venue = Venue { arrive: Duration::from_millis(300), ..Venue::new(2) };
    let error = venue.join(1, "h1").map(drop).unwrap_err().to_string();
    assert!(error.starts_with("cannot tell between r0 on 127.0.0.1 and r1 on h1: cannot reach"), "{error}");
}

#[test]
fn a_name_that_has_no_address_is_told_in_time() {
    let venue = Venue { arrive: Duration::from_millis(700), ..Venue::new(2) };
    let patience = patience(Deadline::after(venue.arrive), BARRIER);
    let (master, roster) = (("no-such-host.invalid", venue.port), [Rank(0), Rank(1)].into());
    let (host, secret) = ("h1", secret());
    let ticket = Ticket { master, rank: Rank(1), roster, host, secret: &secret, patience };
    let over = Deadline::after(venue.arrive + Duration::from_secs(5));
    let error = Member::join(&ticket, Arc::new(|_| {}), venue.log()).map(drop).unwrap_err().to_string();
    assert!(!over.passed(), "it took too long: {error}");
    assert!(
        error.contains("lookup") || error.contains("looked up"),
        "the resolver's word is hidden: {error}"
    );
}

/// Waiting for the root on a port of the range that systems hand out, a rank may connect to itself.
#[test]
fn a_rank_does_not_meet_itself() {
    let venue = Venue { port: 45_678, arrive: Duration::from_millis(1500), ..Venue::new(2) };
    let error = venue.join(1, "h1").map(drop).unwrap_err().to_string();
    assert!(!error.contains("wrong secret"), "{error}");
}

#[test]
fn strangers_are_turned_away_and_logged() {
    let venue = Venue::new(2);
    let ready = std::sync::Barrier::new(2);
    let refused = |rank: u32, secret: &Secret| match venue.join_with(rank, "h", secret) {
        Err(RendezvousError::Refused { cause: crate::auth::AuthError::Refused { why, .. }, .. }) => why,
        other => panic!("{:?}", other.map(drop)),
    };
    venue.everyone(|rank| {
        if rank == 1 {
            let mut stranger = loop {
                match TcpStream::connect(("127.0.0.1", venue.port)) {
                    Ok(stream) => break stream,
                    Err(_) => std::thread::yield_now(),
                }
            };
            stranger.write_all(b"GET / HTTP/1.1\r\nHost: somewhere else altogether\r\n\r\n").unwrap();
            // It is turned away before anything else happens.
            let _ = stranger.read(&mut [0; 1]);
            assert_eq!(
                refused(1, &Secret::from_text("somebody else's secret").unwrap()),
                Refusal::WrongSecret
            );
        }
        let (mut member, _) = venue.join(rank, "h").unwrap();
        ready.wait();
        if rank == 1 {
            assert_eq!(refused(1, &secret()), Refusal::DuplicateRank);
        }
        member.barrier(within(10)).unwrap();
        member.leave();
    });
    let log = venue.log.lock().unwrap();
    let mut reasons: Vec<String> =
        log.iter().map(|line| line.split(": ").skip(2).collect::<Vec<_>>().join(": ")).collect();
    reasons.sort();
    let expected = [
        "not a crossmesh process (it says GET / HT)",
        "r1: turned away: this rank is here already",
        "r1: turned away: wrong secret",
    ];
    assert_eq!(reasons, expected);
    assert!(log[0].starts_with("r0: turned away 127.0.0.1:"), "{}", log[0]);
}

/// A crowd that says nothing, or promises 4 GiB: the job starts all the same, and says little about it.
#[test]
fn a_crowd_of_strangers_delays_nothing() {
    let venue = Venue::new(3);
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut crowd = std::collections::VecDeque::new();
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                let Ok(mut stranger) = TcpStream::connect(("127.0.0.1", venue.port)) else { continue };
                if crowd.len() % 2 == 0 {
                    let _ = stranger.write_all(&[0xff; 64]);
                }
                crowd.push_back(stranger);
                if crowd.len() > 500 {
                    crowd.pop_front();
                }
            }
        });
        venue.everyone(|rank| {
            let (mut member, _) = venue.join(rank, &format!("h{rank}")).unwrap();
            let peers = (0..3).filter(|r| *r != rank).map(Rank).collect();
            assert_eq!(member.connect(&peers, within(10)).unwrap().0.len(), 2);
            (0..5).for_each(|_| member.barrier(within(10)).unwrap());
            member.leave();
        });
        over.store(true, std::sync::atomic::Ordering::SeqCst);
    });
    let lines = venue.log.lock().unwrap().len();
    assert!(lines <= 3 * 30, "{lines} lines");
}

/// Whoever listens says nothing, and a crowd comes to every rank's own door, where tensors' connections come: none waits for another.
#[test]
fn a_crowd_at_the_data_doors_delays_nothing() {
    let venue = Venue::new(3);
    let (over, doors) = (std::sync::atomic::AtomicBool::new(false), Mutex::new(vec![]));
    let met = std::sync::Barrier::new(4);
    std::thread::scope(|scope| {
        let crowd = scope.spawn(|| {
            met.wait();
            let doors: Vec<std::net::SocketAddr> = doors.lock().unwrap().clone();
            // One that stays, and says nothing, at each.
            let idle: Vec<TcpStream> = doors.iter().map(|door| TcpStream::connect(door).unwrap()).collect();
            met.wait();
            let (mut crowd, mut came) = (std::collections::VecDeque::new(), 0u64);
            while !over.load(std::sync::atomic::Ordering::SeqCst) {
                let Ok(mut stranger) = TcpStream::connect(doors[came as usize % 3]) else { continue };
                if came.is_multiple_of(2) {
                    let _ = stranger.write_all(&[0xff; 64]);
                }
                came += 1;
                crowd.push_back(stranger);
                if crowd.len() > 300 {
                    crowd.pop_front();
                }
            }
            drop(idle);
            came
        });
        let connected = venue.everyone(|rank| {
            let (mut member, _) = venue.join(rank, &format!("h{rank}")).unwrap();
            doors.lock().unwrap().push(member.me.tcp);
            met.wait();
            met.wait();
            let peers = (0..3).filter(|r| *r != rank).map(Rank).collect();
            // Half of what an idle stranger may stay: nobody waited for that.
            let connected = member.connect(&peers, Deadline::after(Duration::from_millis(2_500)));
            let connected = connected.map(|(links, _)| links.len()).map_err(|error| error.to_string());
            (0..3).for_each(|_| member.barrier(within(10)).unwrap());
            member.leave();
            connected
        });
        over.store(true, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(connected, [Ok(2), Ok(2), Ok(2)]);
        assert!(crowd.join().unwrap() > 0, "nobody came");
    });
}
