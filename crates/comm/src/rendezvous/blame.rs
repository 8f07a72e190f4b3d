//! Who is at fault? Ranks report whom they waited for in vain, and the lobby knows who answers. In this order:
//!
//! ```text
//! a connection that ended without a word         that rank died
//! nobody of any other host answers               our own host was cut off
//! r0 waits for r1, r1 for r4, r4 does not answer   r4: the end of the chain, first of all if it is silent
//! r0 waits for r1, r1 for r4, r4 failed            r4 too, in its own words
//! ```
//!
//! What a rank only heard from others does not count: the first hand is enough, and hearsay may come from the culprit.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

/// What a rank has to say about a run that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The rank it waited for, where it waited.
    pub blames: Option<Rank>,
    /// Another rank told us.
    pub hearsay: bool,
    /// One line: op, tensor, bytes outstanding.
    pub text: String,
}

/// Why a job ended, told to every rank in the same words.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Abort {
    pub culprit: Rank,
    pub host: String,
    pub text: String,
}

impl fmt::Display for Abort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {} {}", self.culprit, self.host, self.text)
    }
}

/// With a death comes its reason at once; others may still have to find out what they lost.
const SETTLE_SEEN: Duration = Duration::from_millis(150);
/// A death that nobody saw: an engine takes a moment to be sure.
const SETTLE_DEATH: Duration = Duration::from_millis(700);
/// After a first fault others have this long to say whom they wait for.
const SETTLE_FAULT: Duration = Duration::from_millis(500);

/// Everything known when the lobby decides.
#[derive(Debug, Default)]
pub struct Evidence {
    /// Ranks whose connection ended without a word, and how.
    pub lost: BTreeMap<Rank, String>,
    /// Ranks that do not answer.
    pub silent: BTreeSet<Rank>,
    /// Some have been silent for longer than anybody may be.
    pub overdue: bool,
    pub faults: BTreeMap<Rank, Fault>,
    /// Who reported, the first one first.
    pub order: Vec<Rank>,
    /// Of every rank that came.
    pub hosts: BTreeMap<Rank, String>,
}

impl Evidence {
    pub fn is_empty(&self) -> bool {
        self.lost.is_empty() && self.faults.is_empty() && !self.overdue
    }

    pub fn add(&mut self, rank: Rank, fault: Fault) {
        if self.faults.insert(rank, fault).is_none() {
            self.order.push(rank);
        }
    }

    /// How long after the first sign it is clear who is at fault.
    pub fn settles_after(&self) -> Duration {
        let seen = |rank: &Rank| self.witness(*rank).is_some();
        match (self.lost.is_empty(), self.end_of_chain()) {
            (false, _) if self.lost.keys().any(seen) => SETTLE_SEEN,
            (false, _) => SETTLE_DEATH,
            (true, Some(end)) if self.silent.contains(&end) => SETTLE_SEEN,
            (true, _) => SETTLE_FAULT,
        }
    }

    /// The culprit, and what is said about it. None where nothing went wrong.
    pub fn judge(&self) -> Option<(Rank, String)> {
        if let Some((&lost, how)) = self.lost.iter().find(|(r, _)| self.witness(**r).is_some()) {
            return Some((lost, format!("{how}; {}", self.witness(lost)?)));
        }
        if let Some((&lost, how)) = self.lost.first_key_value() {
            return Some((lost, format!("{how}; nothing was outstanding with it")));
        }
        if let Some(here) = self.cut_off() {
            let seen = self.faults.get(&here).or(self.faults.values().next());
            let seen = seen.map_or(String::new(), |fault| format!("; {}", fault.text));
            return Some((here, format!("is cut off: no rank of another host answers{seen}")));
        }
        let end = self.end_of_chain();
        if let Some(silent) = end.filter(|end| self.silent.contains(end)).or_else(|| self.most_blamed()) {
            let seen = self.witness(silent).or_else(|| self.witness(end?));
            let seen = seen.unwrap_or_else(|| "nothing was outstanding with it".into());
            return Some((silent, format!("does not answer; {seen}")));
        }
        let end = end?;
        let owns_up = |fault: &&Fault| !fault.hearsay && fault.blames.is_none_or(|blamed| blamed == end);
        match self.faults.get(&end).filter(owns_up) {
            Some(fault) => Some((end, format!("failed: {}", fault.text))),
            None => {
                let seen = self.witness(end).or_else(|| Some(self.faults.get(&end)?.text.clone()));
                Some((end, format!("is at fault: {}", seen.unwrap_or_default())))
            }
        }
    }

    /// The first rank here, if there are several other hosts and nobody there answers: what they share is the way to us.
    fn cut_off(&self) -> Option<Rank> {
        let (&here, host) = self.hosts.first_key_value()?;
        let others: BTreeMap<&Rank, &String> = self.hosts.iter().filter(|(_, h)| *h != host).collect();
        let hosts: BTreeSet<&String> = others.values().copied().collect();
        (hosts.len() > 1 && others.keys().all(|r| self.silent.contains(r))).then_some(here)
    }

    /// Among those who do not answer, whom others waited for.
    fn most_blamed(&self) -> Option<Rank> {
        let blamed = |rank: &&Rank| self.faults.values().any(|fault| fault.blames == Some(**rank));
        self.silent.iter().find(blamed).or(self.silent.first()).copied()
    }

    /// Whom the one waits for that a rank waits for, and so on, starting from everybody who saw something: where most
    /// of these chains end. Of as many, it is the end of the chain that was reported first: causes come before effects.
    fn end_of_chain(&self) -> Option<Rank> {
        let saw = |rank: &&Rank| !self.faults[*rank].hearsay;
        let ends: Vec<Rank> = self.order.iter().filter(saw).map(|start| self.follow(*start)).collect();
        let chains = |end: &Rank| ends.iter().filter(|e| *e == end).count();
        // The first of the largest: `max_by_key` alone would take the last.
        let most = ends.iter().rev().max_by_key(|end| chains(end)).copied();
        // Where all is hearsay, its source is not among us any more.
        most.or_else(|| self.faults.values().find_map(|fault| fault.blames))
    }

    fn follow(&self, start: Rank) -> Rank {
        let (mut end, mut seen) = (start, BTreeSet::from([start]));
        while let Some(fault) = self.faults.get(&end).filter(|fault| !fault.hearsay)
            && let Some(next) = fault.blames.filter(|next| seen.insert(*next))
        {
            end = next;
        }
        end
    }

    /// What somebody else says about a rank, at first hand if possible.
    fn witness(&self, culprit: Rank) -> Option<String> {
        let blames = |(rank, fault): &(&Rank, &Fault)| fault.blames == Some(culprit) && **rank != culprit;
        let mut witnesses: Vec<&Fault> = self.faults.iter().filter(blames).map(|(_, fault)| fault).collect();
        witnesses.sort_by_key(|fault| fault.hearsay);
        witnesses.first().map(|fault| fault.text.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIED: &str = "is gone";

    /// Ranks 0 and 1 on the first host, 2 and 3 on the second, and so on.
    fn evidence(lost: &[u32], silent: &[u32], faults: &[(u32, Option<u32>)]) -> Evidence {
        let fault = |blames: Option<u32>| Fault {
            blames: blames.map(Rank),
            hearsay: false,
            text: "recv w, 8 B left".into(),
        };
        Evidence {
            lost: lost.iter().map(|r| (Rank(*r), DIED.to_string())).collect(),
            silent: silent.iter().map(|r| Rank(*r)).collect(),
            overdue: false,
            faults: faults.iter().map(|(r, blames)| (Rank(*r), fault(*blames))).collect(),
            order: faults.iter().map(|(r, _)| Rank(*r)).collect(),
            hosts: (0..8).map(|r| (Rank(r), format!("h{}", r / 2))).collect(),
        }
    }

    fn verdict(evidence: &Evidence) -> Option<(u32, String)> {
        evidence.judge().map(|(rank, text)| (rank.0, text))
    }

    fn culprit(lost: &[u32], silent: &[u32], faults: &[(u32, Option<u32>)]) -> Option<u32> {
        verdict(&evidence(lost, silent, faults)).map(|(rank, _)| rank)
    }

    #[test]
    fn the_end_of_the_chain_is_at_fault() {
        assert_eq!(culprit(&[], &[], &[(0, Some(1)), (1, Some(4)), (7, Some(0))]), Some(4));
        assert_eq!(culprit(&[], &[], &[(3, None), (0, Some(3))]), Some(3));
        assert_eq!(culprit(&[], &[], &[]), None);
        // In a circle the one who found out first is right: r2 heard nonsense and hung up, and r3 saw that.
        assert_eq!(culprit(&[], &[], &[(2, Some(3)), (3, Some(2))]), Some(3));
        assert_eq!(culprit(&[], &[], &[(3, Some(2)), (2, Some(3))]), Some(2));
    }

    #[test]
    fn the_dead_go_first() {
        assert_eq!(culprit(&[2], &[5], &[(0, Some(1)), (1, Some(2))]), Some(2));
        let (_, text) = verdict(&evidence(&[2], &[], &[(1, Some(2))])).unwrap();
        assert_eq!(text, "is gone; recv w, 8 B left");
        let (_, text) = verdict(&evidence(&[6], &[], &[])).unwrap();
        assert_eq!(text, "is gone; nothing was outstanding with it");
        // Of two, the one that others saw die: the other may have followed it.
        assert_eq!(culprit(&[1, 4], &[], &[(2, Some(4))]), Some(4));
    }

    #[test]
    fn who_does_not_answer_is_at_fault() {
        // r2 forwards for r3, which was stopped, and is blamed for it before it finds out.
        assert_eq!(culprit(&[], &[3], &[(0, Some(2)), (1, Some(2))]), Some(3));
        assert_eq!(culprit(&[], &[3, 5], &[(0, Some(5))]), Some(5));
        let mut nobody_waits = evidence(&[], &[6], &[]);
        nobody_waits.overdue = true;
        assert_eq!(
            verdict(&nobody_waits),
            Some((6, "does not answer; nothing was outstanding with it".into()))
        );
    }

    #[test]
    fn silence_all_around_means_that_we_are_cut_off() {
        let all = evidence(&[], &[2, 3, 4, 5, 6, 7], &[(0, Some(2)), (1, Some(4))]);
        assert_eq!(
            verdict(&all),
            Some((0, "is cut off: no rank of another host answers; recv w, 8 B left".into()))
        );
        assert_eq!(culprit(&[], &[2, 3, 4, 5, 6], &[(0, Some(2))]), Some(2), "r7 still answers");
        // With one other host there is no telling.
        let mut two_hosts = evidence(&[], &[2, 3], &[(0, Some(2))]);
        two_hosts.hosts.retain(|rank, _| rank.0 < 4);
        assert_eq!(verdict(&two_hosts).unwrap().0, 2);
    }

    #[test]
    fn hearsay_says_nothing_about_the_one_who_repeats_it() {
        let mut evidence = evidence(&[], &[], &[(1, Some(2)), (2, Some(2)), (0, Some(2))]);
        evidence.faults.get_mut(&Rank(0)).unwrap().hearsay = true;
        evidence.faults.get_mut(&Rank(2)).unwrap().hearsay = true;
        assert_eq!(verdict(&evidence), Some((2, "is at fault: recv w, 8 B left".into())));
        evidence.faults.get_mut(&Rank(2)).unwrap().hearsay = false;
        assert_eq!(verdict(&evidence), Some((2, "failed: recv w, 8 B left".into())));
    }

    #[test]
    fn it_settles_sooner_the_more_is_known() {
        assert_eq!(evidence(&[2], &[], &[]).settles_after(), SETTLE_DEATH);
        assert_eq!(evidence(&[2], &[], &[(1, Some(2))]).settles_after(), SETTLE_SEEN);
        assert_eq!(evidence(&[], &[2], &[(1, Some(2))]).settles_after(), SETTLE_SEEN);
        assert_eq!(evidence(&[], &[], &[(1, Some(2))]).settles_after(), SETTLE_FAULT);
    }
}
