//! A rank that has the job's secret and lies on its control connection: whatever it says, nobody believes what cannot be, and
//! nobody but the liar is named.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::RecvTimeoutError;

use super::check::UNIX_PREFIX;
use super::message::{Notice, Reach, Report, Say};
use super::tests::{Venue, secret, within};
use super::*;
use crate::auth::{self, Claim, Role};
use crate::clock::ClockOffset;
use crate::deadline::Socket;
use crate::protect::Protect;

const LIAR: Rank = Rank(2);
const NOBODY: Rank = Rank(999_999);
const NONSENSE: &str = "says what no rank says to the rendezvous";

fn entry(rank: Rank) -> Entry {
    let unix = format!("{UNIX_PREFIX}{rank}-0-0");
    Entry { rank, host: "liar".into(), pid: 1, tcp: "127.0.0.1:9".parse().unwrap(), unix }
}

/// A control connection in the hands of a test.
struct Line {
    socket: Socket,
    read: Vec<u8>,
}

impl Line {
    /// The third rank of a job, as its root gets to know it.
    fn to_root(port: u16) -> Self {
        let deadline = within(10);
        let stream = loop {
            match TcpStream::connect(("127.0.0.1", port)) {
                Ok(stream) => break stream,
                Err(error) => assert!(!deadline.passed(), "no root came: {error}"),
            }
        };
        let mut socket = Socket::Tcp(stream);
        let claim = Claim { role: Role::Rendezvous, from: LIAR, to: Rank(0) };
        auth::dial(&mut socket, &secret(), claim, deadline).unwrap();
        let mut line = Self { socket: socket.without_timeouts().unwrap(), read: vec![] };
        line.say(&Say::Report(entry(LIAR)));
        line
    }

    fn say(&mut self, say: &Say) {
        // Whoever has heard enough hangs up.
        let _gone = self.socket.write_all(&say.to_bytes());
    }

    /// Reads until something like this comes.
    fn hear(&mut self, wanted: impl Fn(&Say) -> bool) {
        loop {
            while let Some((say, len)) = Say::parse(&self.read).unwrap() {
                self.read.drain(..len);
                if wanted(&say) {
                    return;
                }
            }
            let mut bytes = [0; 4096];
            let count = self.socket.read(&mut bytes).unwrap();
            assert!(count > 0, "the other side hung up");
            self.read.extend_from_slice(&bytes[..count]);
        }
    }
}

/// What r0 and r1 make of a third that behaves until all are in, and then does this.
fn with_liar(lie: impl FnOnce(&mut Line) + Send) -> [String; 2] {
    let venue = Venue::new(3);
    std::thread::scope(|scope| {
        let honest = [0, 1].map(|rank| {
            let venue = &venue;
            scope.spawn(move || {
                let (member, aborted) = venue.join(rank, &format!("h{rank}")).unwrap();
                let heard = aborted.recv_timeout(Duration::from_secs(20));
                drop(member);
                heard.map_or_else(|e: RecvTimeoutError| e.to_string(), |abort| abort.to_string())
            })
        });
        let mut line = Line::to_root(venue.port);
        line.hear(|say| matches!(say, Say::AllIn { .. }));
        lie(&mut line);
        honest.map(|rank| rank.join().unwrap())
    })
}

fn pong(there_ns: u64, answered_ns: u64, offset_ns: i64) -> Say {
    let clock = Some(ClockOffset { offset_ns, error_ns: 0 });
    Say::Pong { sent_ns: 0, there_ns, answered_ns, clock, root: true }
}

fn trouble(by: Rank, about: Rank, blames: Rank) -> Say {
    let fault = Fault { blames: Some(blames), hearsay: false, text: "x".into() };
    Say::Trouble(Report { by: entry(by), about: Some(entry(about)), what: Notice::Fault(fault) })
}

/// What a rank could tell its parent, with what is wrong about it.
fn lies() -> Vec<(Say, &'static str)> {
    let no_rank = "it speaks of r999999, and this job has no such rank";
    let reach = vec![(NOBODY, Reach::Refused)];
    let other_door = Entry { unix: "/tmp/.X11-unix/X0".into(), ..entry(LIAR) };
    vec![
        (Say::Abort(Abort::new(NOBODY, "h", "is gone")), no_rank),
        (Say::Abort(Abort::either((Rank(1), "h".into()), (NOBODY, "h".into()), "x")), no_rank),
        (Say::Tell { round: 1, rank: NOBODY, text: "x".into() }, no_rank),
        (Say::Late { rank: NOBODY }, no_rank),
        (trouble(NOBODY, Rank(1), Rank(1)), no_rank),
        (trouble(LIAR, NOBODY, Rank(1)), no_rank),
        (trouble(LIAR, Rank(1), NOBODY), no_rank),
        (Say::Report(entry(NOBODY)), no_rank),
        (Say::Report(other_door), "which is no rank's name"),
        (Say::Seen { by: LIAR, reach }, no_rank),
        (Say::Look { at: vec![entry(Rank(1)); 9] }, "a list of 9 ranks to look for"),
        (Say::Where(vec![Rank(1); 4]), "a list of 4 ranks asked for"),
        (Say::Ping { sent_ns: u64::MAX }, "a clock that says"),
        (pong(u64::MAX, u64::MAX, 0), "a clock that says"),
        (pong(2, 1, 0), "an answer to a ping"),
        (Say::Ready { round: u64::MAX }, "barrier 1 is next"),
        (Say::Ready { round: 0 }, "barrier 1 is next"),
        (Say::Waiting { round: 7 }, "barrier 1 is next"),
    ]
}

#[test]
fn a_child_that_lies_is_named_and_nobody_else() {
    std::thread::scope(|scope| {
        for (lie, why) in lies() {
            scope.spawn(move || {
                for said in with_liar(|line| line.say(&lie)) {
                    assert!(said.starts_with("r2 on liar says what no rank says"), "{lie:?}: {said}");
                    assert!(said.contains(why), "{lie:?}: {said}, not {why}");
                }
            });
        }
    });
}

/// The liar tells the root something in r1's name, before r1 does.
#[test]
fn nobody_speaks_for_another_branch_of_the_tree() {
    let venue = &Venue::new(3);
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            scope.spawn(move || {
                let (mut member, _aborted) = venue.join(rank, "h").unwrap();
                // The liar has spoken before anybody passes.
                member.barrier(within(10)).unwrap();
                let told = member.gather(format!("word of r{rank}"), within(10)).unwrap();
                // The root has heard all before the connection of the liar ends.
                let _ended = member.barrier(within(10));
                told
            })
        });
        let mut line = Line::to_root(venue.port);
        line.hear(|say| matches!(say, Say::AllIn { .. }));
        line.say(&Say::Tell { round: 1, rank: Rank(1), text: "forged".into() });
        line.say(&Say::Tell { round: 1, rank: LIAR, text: "word of r2".into() });
        line.say(&Say::Ready { round: 1 });
        line.hear(|say| matches!(say, Say::Go { round: 1 }));
        line.say(&Say::Ready { round: 2 });
        line.hear(|say| matches!(say, Say::Go { round: 2 }));
        let [root, other] = ranks.map(|rank| rank.join().unwrap());
        let all: BTreeMap<Rank, String> = (0..3).map(|r| (Rank(r), format!("word of r{r}"))).collect();
        assert_eq!((root, other), (Some(all), None));
    });
}

/// What a rank hears of a root that lets it in and then says this.
fn under_a_lying_root(lies: &[Say]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let venue = Venue { port: listener.local_addr().unwrap().port(), ..Venue::new(3) };
    std::thread::scope(|scope| {
        let rank = scope.spawn(|| {
            let joined = venue.join(1, "h1").map(|(mut member, _)| member.barrier(within(10)));
            match joined {
                Ok(Err(error)) | Err(error) => error.to_string(),
                Ok(Ok(())) => "the barrier opened".into(),
            }
        });
        let mut socket = Socket::Tcp(listener.accept().unwrap().0);
        auth::answer(&mut socket, &secret(), within(10), |_| Ok(())).unwrap();
        let mut line = Line { socket: socket.without_timeouts().unwrap(), read: vec![] };
        line.hear(|say| matches!(say, Say::Report(_)));
        lies.iter().for_each(|say| line.say(say));
        rank.join().unwrap()
    })
}

#[test]
fn a_root_that_lies_is_named() {
    let root = |host: &str| Entry { rank: Rank(0), host: host.into(), ..entry(Rank(0)) };
    let (welcome, all_in) = (Say::Welcome { parent: None }, Say::AllIn { hosts: 2 });
    let lies = [
        (vec![Say::Deputies(vec![root("h"); 14])], "where 13 are the most"),
        (vec![Say::Deputies(vec![root("h"), entry(NOBODY)])], "it speaks of r999999"),
        (vec![Say::AllIn { hosts: 4 }], "3 ranks on 4 hosts"),
        (vec![Say::Welcome { parent: Some(entry(Rank(1))) }], "a welcome that is none"),
        (vec![welcome.clone(), welcome.clone()], "a welcome that is none"),
        (vec![welcome.clone(), all_in.clone(), Say::Go { round: u64::MAX }], "barrier 1 is next"),
        (vec![welcome.clone(), all_in.clone(), Say::Overdue { round: 2 }], "barrier 1 is next"),
        (vec![welcome, all_in, pong(1, 1, i64::MIN)], "a clock that says"),
    ];
    std::thread::scope(|scope| {
        for (lies, why) in lies {
            scope.spawn(move || {
                let said = under_a_lying_root(&lies);
                assert!(said.starts_with("r0 on ") && said.contains(NONSENSE), "{lies:?}: {said}");
                assert!(said.contains(why), "{lies:?}: {said}, not {why}");
            });
        }
    });
}

/// A child that says our end had hung up, while it is as well as ever: the connection ended, and we do not take the blame.
#[test]
fn nobody_is_talked_into_owning_up() {
    for said in with_liar(|line| line.say(&Say::HungUp)) {
        assert!(said.starts_with("r2 on liar is gone"), "{said}");
    }
}

#[test]
fn what_a_liar_says_about_others_cannot_reach_into_the_terminal() {
    let text = "\x1b[31mis gone\x1b]0;pwned\x07";
    for said in with_liar(|line| line.say(&Say::Abort(Abort::new(Rank(1), "h\x1b[2J", text)))) {
        assert!(said.contains("is gone") && !said.contains(char::is_control), "{said:?}");
    }
}

/// Somebody on the way between a rank and its root: what passes, which a test may change.
struct Wiretap {
    port: u16,
    heard: std::sync::mpsc::Receiver<Vec<u8>>,
}

impl Wiretap {
    /// Waits for one connection, and carries it to `port`; `change` sees what the rank says, beginning with its first byte.
    #[expect(clippy::disallowed_methods, reason = "somebody else, who ends when the connections do")]
    fn before(port: u16, change: impl Fn(usize, &mut [u8]) + Send + Copy + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let tap = listener.local_addr().unwrap().port();
        let (hears, heard) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            // A rank knocks until the root opens.
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(("127.0.0.1", port)) else { continue };
                let (from, to) = (near.try_clone().unwrap(), far.try_clone().unwrap());
                let up = hears.clone();
                std::thread::spawn(move || pass(from, to, &up, change));
                let down = hears.clone();
                std::thread::spawn(move || pass(far, near, &down, |_, _| {}));
            }
        });
        Self { port: tap, heard }
    }
}

fn pass(
    mut from: TcpStream,
    mut to: TcpStream,
    hears: &std::sync::mpsc::Sender<Vec<u8>>,
    change: impl Fn(usize, &mut [u8]),
) {
    let (mut bytes, mut at) = ([0; 4096], 0);
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        change(at, &mut bytes[..count]);
        at += count;
        let _nobody_listens = hears.send(bytes[..count].to_vec());
        if to.write_all(&bytes[..count]).is_err() {
            return;
        }
    }
    let _gone = to.shutdown(std::net::Shutdown::Write);
}

/// Two ranks that meet through a wiretap, pass a barrier and tell each other something: what was heard on the way, and how it ended.
fn tapped(
    protect: Protect,
    change: impl Fn(usize, &mut [u8]) + Send + Copy + 'static,
) -> (String, [Result<(), String>; 2]) {
    let venue = Venue::new(2);
    let tap = Wiretap::before(venue.port, change);
    let near = Venue { port: tap.port, ..Venue::new(2) };
    let secret = secret().protecting(protect);
    let part = |venue: &Venue, rank: u32| -> Result<(), String> {
        let (mut member, _aborted) =
            venue.join_with(rank, &format!("h{rank}"), &secret).map_err(|e| e.to_string())?;
        let told = member.barrier(within(10)).and_then(|()| member.gather("a word".into(), within(10)));
        told.and_then(|_| member.barrier(within(10))).map_err(|error| error.to_string())?;
        member.leave();
        Ok(())
    };
    let ends = std::thread::scope(|scope| {
        let ranks = [(&venue, 0), (&near, 1)].map(|(venue, rank)| scope.spawn(move || part(venue, rank)));
        ranks.map(|rank| rank.join().unwrap())
    });
    let heard: Vec<u8> = tap.heard.try_iter().flatten().collect();
    (String::from_utf8_lossy(&heard).into_owned(), ends)
}

#[test]
fn words_of_control_are_protected_on_their_way() {
    for protect in Protect::ALL {
        let (heard, ends) = tapped(protect, |_, _| {});
        assert_eq!(ends, [Ok(()), Ok(())], "{protect}");
        // Who reads along sees everything that is not encrypted.
        for word in ["report", "a word", "ready"] {
            assert_eq!(heard.contains(word), protect != Protect::Encrypt, "{protect}: {word}");
        }
    }
}

#[test]
fn a_word_that_was_changed_on_the_way_is_noticed_where_it_is_protected() {
    for protect in [Protect::Sign, Protect::Encrypt] {
        // The handshake is 84 bytes long; behind the record's prefix its frame begins.
        let (_, ends) = tapped(protect, |at, bytes| {
            if let Some(byte) = (84 + 24 + 20usize).checked_sub(at).and_then(|i| bytes.get_mut(i)) {
                *byte ^= 1;
            }
        });
        let said = ends[0].clone().unwrap_err();
        assert!(said.contains("frame 0 was changed on the way"), "{protect}: {said}");
    }
}
