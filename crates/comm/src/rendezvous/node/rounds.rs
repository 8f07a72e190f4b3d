//! Barriers, words for the root, and farewells: up the tree when a whole subtree is ready, down when all are.

use std::collections::BTreeSet;

use crossmesh_core::id::Rank;

use super::{Heard, LinkId, MS, Node};
use crate::rendezvous::message::Say;
use crate::rendezvous::{Abort, RankNames};

/// The root hears of a subtree that waits for a part of itself after this time.
const WAITING_NS: u64 = 1_000 * MS;
/// Those who are late say so within this time.
const LATE_NS: u64 = 300 * MS;

/// How far barriers are.
#[derive(Debug, Default)]
pub(super) struct Barrier {
    /// The last one that this rank itself came to.
    pub mine: u64,
    /// The last one that opened.
    opened: u64,
    /// The last ones that were passed up, wholly and in part.
    said: u64,
    said_waiting: u64,
    /// Since when somebody waits at the next.
    since_ns: Option<u64>,
    /// At the root: when it was asked who is late, and who is.
    overdue: Option<(u64, BTreeSet<Rank>)>,
}

impl Barrier {
    /// Time that passed without us does not count.
    pub fn shift(&mut self, away: u64, now: u64) {
        self.since_ns.iter_mut().for_each(|since| *since = (*since + away).min(now));
    }
}

impl Node {
    pub(super) fn on_round(&mut self, now: u64, link: LinkId, say: Say) {
        let from_above = self.up.as_ref().is_some_and(|up| up.link == link);
        let next = self.barrier.opened + 1;
        let is_wrong = match say {
            Say::Ready { round } => round != next,
            // It may cross the word that the barrier opens.
            Say::Waiting { round } => round > next,
            Say::Go { round } | Say::Overdue { round } => from_above && round != next,
            _ => false,
        };
        if is_wrong {
            return self.refuse(now, link, format!("barrier {next} is next, and it speaks of another"));
        }
        match say {
            Say::Ready { round } => self.down.get_mut(&link).into_iter().for_each(|d| d.ready = round),
            Say::Waiting { round } => self.down.get_mut(&link).into_iter().for_each(|d| d.waiting = round),
            Say::Go { round } if from_above => self.go(now, round),
            Say::Overdue { round } if from_above => {
                self.send_down(&say);
                if self.barrier.mine < round {
                    let rank = self.me.rank;
                    self.send_up(Say::Late { rank });
                }
            }
            _ => {}
        }
        self.check_round(now);
    }

    /// Whether the next barrier opens, or our part of the tree has come to it.
    pub(super) fn check_round(&mut self, now: u64) {
        let round = self.barrier.opened + 1;
        let some = |ready: u64, waiting: u64| ready.max(waiting) >= round;
        if self.barrier.mine >= round || self.down.values().any(|d| some(d.ready, d.waiting)) {
            self.barrier.since_ns.get_or_insert(now);
        }
        let all = self.barrier.mine >= round && self.down.values().all(|d| d.bye || d.ready >= round);
        if !all || self.broken || self.all_in.is_none() || self.verdict.is_some() {
            return;
        }
        if self.root.is_some() {
            self.go(now, round);
        } else if self.barrier.said < round {
            self.barrier.said = round;
            self.send_up(Say::Ready { round });
        }
    }

    /// The barrier opens.
    fn go(&mut self, now: u64, round: u64) {
        self.barrier.opened = round;
        (self.barrier.since_ns, self.barrier.overdue) = (None, None);
        self.send_down(&Say::Go { round });
        let clock = self.clock(now);
        self.tell(Heard::Go { round, clock });
    }

    pub(super) fn barrier_due(&self) -> Option<u64> {
        let since = self.barrier.since_ns?;
        let waiting = (self.barrier.said_waiting <= self.barrier.opened).then_some(since + WAITING_NS);
        let due = since + self.limits.barrier_ns;
        match (&self.root, &self.barrier.overdue) {
            (Some(_), Some((asked, _))) => Some(asked + LATE_NS),
            (Some(_), None) => Some(due),
            (None, _) => waiting,
        }
    }

    pub(super) fn look_at_barrier(&mut self, now: u64) {
        if self.barrier_due().is_none_or(|due| now < due) {
            return;
        }
        let round = self.barrier.opened + 1;
        if self.root.is_none() {
            self.barrier.said_waiting = round;
            return self.send_up(Say::Waiting { round });
        }
        match self.barrier.overdue.take() {
            Some((_, late)) => self.name_late(now, &late),
            None => {
                let late =
                    if self.barrier.mine < round { BTreeSet::from([self.me.rank]) } else { BTreeSet::new() };
                self.barrier.overdue = Some((now, late));
                self.send_down(&Say::Overdue { round });
            }
        }
    }

    fn name_late(&mut self, now: u64, late: &BTreeSet<Rank>) {
        // Nobody owns up: those whose subtree is not here do not even answer, which is noticed by other means.
        let Some(&first) = late.first() else { return };
        let waited_s = self.limits.barrier_ns as f64 / 1e9;
        let text = format!(
            "keeps the others waiting: {} did not come to the barrier within {waited_s:.1} s of the first",
            RankNames(late)
        );
        let host = self.known.get(&first).map_or("an unknown host".into(), |entry| entry.host.clone());
        self.conclude(now, Abort::new(first, host, text), None);
    }

    /// Whether words of a rank may come by that connection: at the root, where it is known who hangs where.
    pub(super) fn is_under(&self, link: LinkId, rank: Rank) -> bool {
        let Some(root) = &self.root else { return self.down.contains_key(&link) };
        self.down.get(&link).is_some_and(|down| root.branch_of(rank) == Some(down.entry.rank))
    }

    /// Words on their way to the root.
    pub(super) fn on_words(&mut self, now: u64, say: Say) {
        if self.root.is_none() {
            return self.send_up(say);
        }
        match say {
            Say::Tell { round, rank, text } => self.tell(Heard::Told { round, rank, text }),
            Say::Late { rank } => {
                if let Some((_, late)) = &mut self.barrier.overdue {
                    late.insert(rank);
                }
            }
            _ => {}
        }
        self.check_round(now);
    }

    pub(super) fn on_bye(&mut self, now: u64, link: LinkId) {
        if let Some(down) = self.down.get_mut(&link) {
            down.bye = true;
        }
        self.check_round(now);
        self.check_left(now);
    }

    /// Once we and all under us are done, the parent hears so.
    pub(super) fn check_left(&mut self, _now: u64) {
        let alone = self.up.is_none() && self.root.is_none();
        if self.left && (alone || self.down.values().all(|down| down.bye)) {
            self.send_up(Say::Bye);
            self.tell(Heard::Left);
        }
    }
}
