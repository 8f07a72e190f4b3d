//! Nothing that another rank says is believed before it is held against what was agreed: ranks are of this job, lists no longer
//! than such lists are, times within what clocks say. Text that may reach a terminal is made plain.
//!
//! Whoever knows the secret can still say of another rank that it failed: that is what blame is about. What it cannot do is
//! bring in ranks that do not exist, make others work without bound, or write on their terminals.

use std::collections::BTreeSet;

use crossmesh_core::id::Rank;

use super::message::{Notice, Report, Say};
use super::node::{FAN_OUT, MAX_SUSPECTS};
use super::{Abort, Entry, Fault};
use crate::clock::ClockOffset;

/// More is not read by anybody.
const MAX_TEXT: usize = 4096;
/// Names of hosts are at most 253 characters long.
const MAX_HOST: usize = 255;
/// An abstract socket's name, which the kernel keeps beside its length.
const MAX_UNIX_NAME: usize = 107;
/// Every rank's own door begins like this; whoever dials another name may greet somebody who is no rank at all.
pub const UNIX_PREFIX: &str = "crossmesh-";
/// 73 years: no clock that counts from a machine's start says more, and sums of a few such times still fit.
pub const LONGEST_NS: u64 = 1 << 61;

impl Say {
    /// The message as it may be believed, in a job of these ranks; or why no rank says that.
    pub fn checked(mut self, roster: &BTreeSet<Rank>) -> Result<Self, String> {
        let agreed = Agreed { roster };
        match &mut self {
            Say::Report(entry) => agreed.entry(entry)?,
            Say::Welcome { parent } => parent.iter_mut().try_for_each(|entry| agreed.entry(entry))?,
            Say::Deputies(all) => agreed.entries("deputies", all, 1 + FAN_OUT)?,
            Say::AllIn { hosts } => agreed.hosts(*hosts)?,
            Say::Late { rank } | Say::Tell { rank, .. } | Say::Alive { rank, .. } => agreed.rank(*rank)?,
            Say::Ping { sent_ns } => agreed.times(&[*sent_ns])?,
            Say::Pong { sent_ns, there_ns, answered_ns, clock, .. } => {
                agreed.times(&[*sent_ns, *there_ns, *answered_ns])?;
                agreed.clock(*clock)?;
            }
            Say::Trouble(report) => agreed.report(report)?,
            Say::Look { at } => agreed.entries("ranks to look for", at, MAX_SUSPECTS)?,
            Say::Seen { by, reach } => {
                agreed.rank(*by)?;
                agreed.list("ranks looked for", reach.len(), MAX_SUSPECTS)?;
                reach.iter().try_for_each(|(rank, _)| agreed.rank(*rank))?;
            }
            Say::Where(ranks) => {
                agreed.list("ranks asked for", ranks.len(), roster.len())?;
                ranks.iter().try_for_each(|rank| agreed.rank(*rank))?;
            }
            Say::Entries(all) => agreed.entries("addresses", all, roster.len())?,
            Say::Abort(abort) => agreed.abort(abort)?,
            Say::Settled | Say::Bye | Say::HungUp => {}
            // Which round it is depends on the last one that opened: see `Node::on_round`.
            Say::Ready { .. } | Say::Waiting { .. } | Say::Go { .. } | Say::Overdue { .. } => {}
        }
        Ok(self)
    }
}

/// What messages are held against.
struct Agreed<'a> {
    roster: &'a BTreeSet<Rank>,
}

impl Agreed<'_> {
    fn rank(&self, rank: Rank) -> Result<(), String> {
        match self.roster.contains(&rank) {
            true => Ok(()),
            false => Err(format!("it speaks of {rank}, and this job has no such rank")),
        }
    }

    fn list(&self, what: &str, len: usize, most: usize) -> Result<(), String> {
        if len <= most { Ok(()) } else { Err(format!("a list of {len} {what}, where {most} are the most")) }
    }

    fn hosts(&self, hosts: u32) -> Result<(), String> {
        let ranks = self.roster.len();
        match (1..=ranks).contains(&(hosts as usize)) {
            true => Ok(()),
            false => Err(format!("{ranks} ranks on {hosts} hosts")),
        }
    }

    fn times(&self, all: &[u64]) -> Result<(), String> {
        let late = all.iter().find(|ns| **ns > LONGEST_NS);
        late.map_or(Ok(()), |ns| Err(format!("a clock that says {ns} ns")))
    }

    fn clock(&self, clock: Option<ClockOffset>) -> Result<(), String> {
        clock.map_or(Ok(()), |c| self.times(&[c.offset_ns.unsigned_abs(), c.error_ns]))
    }

    fn entries(&self, what: &str, all: &mut [Entry], most: usize) -> Result<(), String> {
        self.list(what, all.len(), most)?;
        all.iter_mut().try_for_each(|entry| self.entry(entry))
    }

    fn entry(&self, entry: &mut Entry) -> Result<(), String> {
        self.rank(entry.rank)?;
        let Entry { rank, unix, host, .. } = entry;
        let is_door = unix.starts_with(UNIX_PREFIX) && unix.len() <= MAX_UNIX_NAME;
        if !unix.is_empty() && !is_door {
            let name = plain_line(unix, MAX_HOST);
            return Err(format!("{rank} is to be reached at @{name}, which is no rank's name"));
        }
        *host = plain_host(host);
        Ok(())
    }

    fn report(&self, report: &mut Report) -> Result<(), String> {
        self.entry(&mut report.by)?;
        report.about.iter_mut().try_for_each(|entry| self.entry(entry))?;
        match &mut report.what {
            Notice::Fault(Fault { blames, text, .. }) => {
                *text = plain_text(text);
                blames.map_or(Ok(()), |rank| self.rank(rank))
            }
            Notice::Lost(how) | Notice::Nonsense(how) => {
                *how = plain_text(how);
                Ok(())
            }
            Notice::Silent { .. } => Ok(()),
        }
    }

    fn abort(&self, abort: &mut Abort) -> Result<(), String> {
        self.rank(abort.culprit)?;
        (abort.host, abort.text) = (plain_host(&abort.host), plain_text(&abort.text));
        let Some((or, host)) = &mut abort.or else { return Ok(()) };
        *host = plain_host(host);
        self.rank(*or)?;
        match *or == abort.culprit {
            true => Err(format!("it cannot tell between {or} and {or}")),
            false => Ok(()),
        }
    }
}

/// A host's name without signs that a terminal would obey.
pub fn plain_host(host: &str) -> String {
    plain_line(host, MAX_HOST)
}

/// What went wrong, likewise, and not too long. Hints have lines of their own.
fn plain_text(text: &str) -> String {
    let text: String = text.chars().take(MAX_TEXT).collect();
    text.split("\nhint: ").map(|line| plain_line(line, MAX_TEXT)).collect::<Vec<_>>().join("\nhint: ")
}

fn plain_line(text: &str, most: usize) -> String {
    text.chars().take(most).map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::rendezvous::message::Reach;

    const NOBODY: Rank = Rank(999_999);

    fn roster() -> BTreeSet<Rank> {
        (0..20).map(Rank).collect()
    }

    fn entry(rank: Rank) -> Entry {
        let unix = format!("{UNIX_PREFIX}{rank}-7-8");
        Entry { rank, host: "h".into(), pid: 7, tcp: "10.0.0.1:8".parse().unwrap(), unix }
    }

    fn fault(blames: Option<Rank>) -> Notice {
        Notice::Fault(Fault { blames, hearsay: false, text: "no memory".into() })
    }

    fn pong(there_ns: u64, offset_ns: i64, error_ns: u64) -> Say {
        let clock = Some(ClockOffset { offset_ns, error_ns });
        Say::Pong { sent_ns: 1, there_ns, answered_ns: there_ns, clock, root: true }
    }

    /// Every kind of message, about a rank.
    fn about(rank: Rank) -> Vec<Say> {
        let report = |by: Rank, about: Rank, what: Notice| {
            Say::Trouble(Report { by: entry(by), about: Some(entry(about)), what })
        };
        let either = Abort::either((Rank(3), "h".into()), (rank, "h".into()), "x");
        vec![
            Say::Report(entry(rank)),
            Say::Welcome { parent: Some(entry(rank)) },
            Say::Deputies(vec![entry(Rank(0)), entry(rank)]),
            Say::Late { rank },
            Say::Tell { round: 1, rank, text: "any\nthing".into() },
            Say::Alive { rank, root: true },
            report(rank, Rank(2), fault(None)),
            report(Rank(2), rank, Notice::Lost("gone".into())),
            report(Rank(2), Rank(2), fault(Some(rank))),
            Say::Look { at: vec![entry(rank)] },
            Say::Seen { by: rank, reach: vec![] },
            Say::Seen { by: Rank(2), reach: vec![(rank, Reach::Refused)] },
            Say::Where(vec![rank]),
            Say::Entries(vec![entry(rank)]),
            Say::Abort(Abort::new(rank, "h", "is gone")),
            Say::Abort(either),
        ]
    }

    #[test]
    fn ranks_of_the_job_are_believed_and_others_are_not() {
        for say in about(Rank(5)) {
            assert_eq!(say.clone().checked(&roster()), Ok(say));
        }
        for say in about(NOBODY) {
            let why = say.clone().checked(&roster()).unwrap_err();
            assert_eq!(why, "it speaks of r999999, and this job has no such rank", "{say:?}");
        }
        // Who was in the job once, and does not take part any more, is nobody either.
        let left: BTreeSet<Rank> = roster().into_iter().filter(|rank| *rank != Rank(5)).collect();
        about(Rank(5)).into_iter().for_each(|say| assert!(say.checked(&left).is_err()));
    }

    #[test]
    fn lists_and_numbers_have_bounds() {
        let many = |n: usize| vec![entry(Rank(1)); n];
        let is_refused = |say: Say, why: &str| {
            let said = say.checked(&roster()).unwrap_err();
            assert!(said.contains(why), "{said}, not {why}");
        };
        is_refused(Say::Look { at: many(9) }, "a list of 9 ranks to look for, where 8 are the most");
        is_refused(Say::Deputies(many(14)), "where 13 are the most");
        is_refused(Say::Entries(many(21)), "where 20 are the most");
        is_refused(Say::Where(vec![Rank(1); 21]), "where 20 are the most");
        let reach = vec![(Rank(1), Reach::Answers); 9];
        is_refused(Say::Seen { by: Rank(1), reach }, "where 8 are the most");
        is_refused(Say::AllIn { hosts: 0 }, "20 ranks on 0 hosts");
        is_refused(Say::AllIn { hosts: 21 }, "20 ranks on 21 hosts");
        for lie in [pong(u64::MAX, 0, 0), pong(0, i64::MIN, 0), pong(0, i64::MAX, 0), pong(0, 0, u64::MAX)] {
            is_refused(lie, "a clock that says");
        }
        is_refused(Say::Ping { sent_ns: u64::MAX }, "a clock that says");
        assert!(pong(1 << 60, -(1 << 60), 1 << 60).checked(&roster()).is_ok());
        let twice = Abort { or: Some((Rank(1), "h".into())), ..Abort::new(Rank(1), "h", "x") };
        is_refused(Say::Abort(twice), "cannot tell between r1 and r1");
    }

    #[test]
    fn nobody_is_sent_to_a_door_that_is_no_ranks() {
        for unix in ["/tmp/.X11-unix/X0", "dbus\x1b[2J", &format!("{UNIX_PREFIX}{}", "x".repeat(100))] {
            let elsewhere = Entry { unix: unix.into(), ..entry(Rank(1)) };
            let why = Say::Report(elsewhere).checked(&roster()).unwrap_err();
            assert!(why.ends_with("which is no rank's name"), "{why}");
            assert!(!why.contains(char::is_control), "{why:?}");
        }
        let unknown = Entry { rank: Rank(1), ..Entry::unknown() };
        assert!(Say::Report(unknown).checked(&roster()).is_ok(), "one whose address is not known yet");
    }

    #[test]
    fn a_terminal_obeys_nobody() {
        let abort =
            |host: &str, text: String| match Say::Abort(Abort::new(Rank(1), host, text)).checked(&roster()) {
                Ok(Say::Abort(abort)) => abort.to_string(),
                other => panic!("{other:?}"),
            };
        let said = abort("h\x1b[2J", "is gone\x07\x1b]0;title\x07".to_string() + &"x".repeat(9000));
        assert!(!said.contains(char::is_control) && said.len() < 9000, "{said}");
        assert!(said.starts_with("r1 on h [2J is gone"), "{said}");
        let hinted = abort("h\nhint: x", "no room\n\nhint: make\tsome\nroom\nhint: or not".into());
        assert_eq!(hinted, "r1 on h hint: x no room \nhint: make some room\nhint: or not");
        // Words that become part of a verdict, and hosts that it names.
        let rude = Entry { host: "h\x1b[2J".into(), ..entry(Rank(1)) };
        let what =
            [Notice::Lost("\x07".into()), Notice::Nonsense("\x07".into()), fault(None)].map(|notice| {
                match notice {
                    Notice::Fault(fault) => Notice::Fault(Fault { text: "\x1b[31m".into(), ..fault }),
                    notice => notice,
                }
            });
        for what in what {
            let report = Report { by: rude.clone(), about: Some(rude.clone()), what };
            let plain = format!("{:?}", Say::Trouble(report).checked(&roster()).unwrap());
            assert!(!plain.contains("\\u{"), "{plain}");
        }
    }

    proptest! {
        /// Whatever passes can be checked again, and stays as it is.
        #[test]
        fn what_is_plain_stays_as_it_is(host in ".{0,40}", text in ".{0,40}(\nhint: .{0,20})?") {
            let once = Say::Abort(Abort::new(Rank(1), host, text)).checked(&roster()).unwrap();
            prop_assert_eq!(once.clone().checked(&roster()), Ok(once));
        }
    }
}
