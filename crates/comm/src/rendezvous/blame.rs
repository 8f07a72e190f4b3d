//! Who is at fault? Ranks report whom they waited for in vain, and who leads the inquiry has everybody concerned looked
//! for by several others. In this order:
//!
//! ```text
//! a connection carried what no rank says                 who said it
//! a connection that ended without a word, or a host
//! that says nobody is there                              that rank died
//! r1 and r2 both say that of each other                  the connection: no telling which end
//! nobody of several other hosts can be reached           our own host was cut off
//! nobody reaches r4                                      r4: stopped, or its host cut off
//! r1 does not reach r2, others reach both                the way between them: no telling which end
//! r0 waits for r1, r1 for r4, r4 answers                 r4: the end of the chain
//! ```
//!
//! Where somebody who was asked has not answered yet, and is not known to be dead, the last two and silence prove little: what is still to
//! come may clear whoever looks guilty. Then there is no telling between the one who waits and the one it waits for.
//!
//! What a rank only heard from others does not count: the first hand is enough, and hearsay may come from the culprit.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

use super::message::Reach;

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
    /// The other one that it may be, and its host, where there is no telling.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub or: Option<(Rank, String)>,
}

impl Abort {
    pub fn new(culprit: Rank, host: impl Into<String>, text: impl Into<String>) -> Self {
        Self { culprit, host: host.into(), text: text.into(), or: None }
    }

    /// One of two. The lower rank comes first, whoever says it.
    pub fn either(a: (Rank, String), b: (Rank, String), text: impl Into<String>) -> Self {
        let (first, second) = if a.0 <= b.0 { (a, b) } else { (b, a) };
        Self { culprit: first.0, host: first.1, text: text.into(), or: Some(second) }
    }
}

/// Of those who did not answer, so many are told of.
const MAX_LATE: usize = 4;

impl fmt::Display for Abort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { culprit, host, text, or } = self;
        match or {
            None => write!(f, "{culprit} on {host} {text}"),
            Some((or, there)) => {
                write!(f, "cannot tell between {culprit} on {host} and {or} on {there}: {text}")
            }
        }
    }
}

const MS: u64 = 1_000_000;
/// With a death comes its reason at once; others may still have to find out what they lost.
const SETTLE_SEEN_NS: u64 = 150 * MS;
/// A death that nobody saw: an engine takes a moment to be sure.
const SETTLE_DEATH_NS: u64 = 700 * MS;
/// After a first fault others have this long to say whom they wait for.
const SETTLE_FAULT_NS: u64 = 400 * MS;

/// Everything that whoever leads the inquiry knows.
#[derive(Debug, Clone)]
pub struct Evidence {
    /// Who leads.
    pub me: Rank,
    /// Ranks whose connection ended without a word: how, and which was the first.
    pub lost: BTreeMap<Rank, (String, usize)>,
    /// Who says so of whom.
    pub lost_by: BTreeSet<(Rank, Rank)>,
    /// Who said what no rank says.
    pub nonsense: BTreeMap<Rank, String>,
    /// Ranks that were reported to say nothing, and by whom.
    pub silent: BTreeMap<Rank, String>,
    pub faults: BTreeMap<Rank, Fault>,
    /// Whose part failed, the first one first.
    pub order: Vec<Rank>,
    /// Everybody who reported anything.
    pub reporters: BTreeSet<Rank>,
    /// Of every rank that is known.
    pub hosts: BTreeMap<Rank, String>,
    /// Whom others were asked to look for.
    pub looked_for: BTreeSet<Rank>,
    /// What came of one rank's attempt to reach another.
    pub reach: BTreeMap<(Rank, Rank), Reach>,
    /// Who was asked, whether it is there or whom it reaches, and has not said all of it yet.
    pub still_looking: BTreeSet<Rank>,
}

impl Evidence {
    pub fn new(me: Rank) -> Self {
        let (lost, lost_by, nonsense, silent, faults, order) = Default::default();
        let (reporters, hosts, looked_for, reach, still_looking) = Default::default();
        Self {
            me,
            lost,
            lost_by,
            nonsense,
            silent,
            faults,
            order,
            reporters,
            hosts,
            looked_for,
            reach,
            still_looking,
        }
    }

    pub fn add_fault(&mut self, rank: Rank, fault: Fault) {
        // Who says what was wrong has not died without a word.
        self.lost.remove(&rank);
        self.reporters.insert(rank);
        if self.faults.insert(rank, fault).is_none() {
            self.order.push(rank);
        }
    }

    pub fn add_lost(&mut self, by: Rank, rank: Rank, how: String) {
        let number = self.lost.len();
        if !self.faults.contains_key(&rank) {
            self.lost.entry(rank).or_insert((how, number));
            self.lost_by.insert((by, rank));
        }
    }

    pub fn add_nonsense(&mut self, rank: Rank, how: String) {
        self.nonsense.entry(rank).or_insert(how);
    }

    /// Everybody who may be at fault, as far as anybody says.
    pub fn suspects(&self) -> BTreeSet<Rank> {
        let blamed = self.faults.values().filter_map(|fault| fault.blames);
        let seen = self.silent.keys().chain(self.lost.keys()).chain(self.nonsense.keys());
        blamed.chain(seen.copied()).collect()
    }

    /// A death that somebody saw is a death, whatever a look around would show.
    pub fn is_clear_without_a_look(&self) -> bool {
        !self.lost.is_empty() || !self.nonsense.is_empty()
    }

    /// Whether a rank has said of everybody it was sent to look for whether it reaches them.
    pub fn has_seen_all(&self, by: Rank) -> bool {
        self.looked_for.iter().all(|to| *to == by || self.reach.contains_key(&(by, *to)))
    }

    /// How long after the first sign it is clear who is at fault.
    pub fn settles_after_ns(&self) -> u64 {
        let dead = self.dead();
        match (dead.is_empty(), dead.iter().any(|rank| self.witness(*rank).is_some())) {
            (false, true) => SETTLE_SEEN_NS,
            (false, false) => SETTLE_DEATH_NS,
            (true, _) if self.still_looking.is_empty() => SETTLE_FAULT_NS,
            (true, _) => SETTLE_DEATH_NS,
        }
    }

    /// The verdict. None where nothing went wrong.
    pub fn judge(&self) -> Option<Abort> {
        self.judge_nonsense()
            .or_else(|| self.judge_dead())
            .or_else(|| self.judge_broken())
            .or_else(|| self.judge_unreached())
            .or_else(|| self.judge_ways())
            .or_else(|| self.judge_chain())
    }

    /// Whoever looks guilty, while somebody has not answered yet who might clear it: either that one, or who waits for it.
    fn unsure(&self, guilty: Rank) -> Abort {
        let waits = |rank: &&Rank| **rank != guilty && self.faults[*rank].blames == Some(guilty);
        let first_hand = self.order.iter().filter(waits).find(|rank| !self.faults[*rank].hearsay);
        let other = self.still_looking.iter().find(|rank| **rank != guilty);
        let by = first_hand.or(other).copied().unwrap_or(self.me);
        let late: Vec<String> = self.still_looking.iter().take(MAX_LATE).map(Rank::to_string).collect();
        let seen = self.witness(guilty).map_or(String::new(), |seen| format!("; {seen}"));
        let text = format!("{} did not answer in time, and may know more{seen}", late.join(", "));
        self.either(by, guilty, text)
    }

    fn abort(&self, rank: Rank, text: String) -> Abort {
        Abort::new(rank, self.host(rank), text)
    }

    fn either(&self, a: Rank, b: Rank, text: String) -> Abort {
        Abort::either((a, self.host(a)), (b, self.host(b)), text)
    }

    fn host(&self, rank: Rank) -> String {
        self.hosts.get(&rank).cloned().unwrap_or_else(|| "an unknown host".into())
    }

    fn dead(&self) -> BTreeSet<Rank> {
        let refused =
            self.reach.iter().filter(|(_, reach)| **reach == Reach::Refused).map(|((_, to), _)| *to);
        // Who reported may have ended since.
        let refused = refused.filter(|rank| !self.is_there(*rank));
        self.lost.keys().copied().chain(refused).collect()
    }

    /// What somebody said in a connection of the tree; whoever heard it has hung up, which the other may well report.
    fn judge_nonsense(&self) -> Option<Abort> {
        let (rank, how) = self.nonsense.first_key_value()?;
        let seen = self.witness(*rank).unwrap_or_else(|| "nothing was outstanding with it".into());
        Some(self.abort(*rank, format!("{how}; {seen}")))
    }

    /// Pairs that lost each other: who says so is not dead.
    fn broken(&self) -> impl Iterator<Item = (Rank, Rank)> {
        let both = |(a, b): &&(Rank, Rank)| a < b && self.lost_by.contains(&(*b, *a));
        let lost = |(a, b): &&(Rank, Rank)| self.lost.contains_key(a) && self.lost.contains_key(b);
        self.lost_by.iter().filter(both).filter(lost).copied()
    }

    fn judge_broken(&self) -> Option<Abort> {
        let (a, b) = self.broken().next()?;
        let seen = self.witness(b).or_else(|| self.witness(a));
        let seen = seen.unwrap_or_else(|| "nothing was outstanding with them".into());
        Some(self.either(a, b, format!("their connection ended, though both are there; {seen}")))
    }

    fn judge_dead(&self) -> Option<Abort> {
        let broken: BTreeSet<Rank> = self.broken().flat_map(|(a, b)| [a, b]).collect();
        let dead: BTreeSet<Rank> = self.dead().difference(&broken).copied().collect();
        let seen = dead.iter().copied().find(|rank| self.witness(*rank).is_some());
        let first = || dead.iter().copied().min_by_key(|r| self.lost.get(r).map_or(usize::MAX, |(_, n)| *n));
        let rank = seen.or_else(first)?;
        let how = self.lost.get(&rank).map_or("is gone: its host says that nobody is there", |(how, _)| how);
        let seen = self.witness(rank).unwrap_or_else(|| "nothing was outstanding with it".into());
        Some(self.abort(rank, format!("{how}; {seen}")))
    }

    /// Whether anybody has reached it.
    fn answers(&self, rank: Rank) -> bool {
        rank == self.me || self.reach.iter().any(|((_, to), reach)| *to == rank && *reach == Reach::Answers)
    }

    /// Whether it is there: somebody has reached it, or it has something to say.
    fn is_there(&self, rank: Rank) -> bool {
        self.answers(rank) || self.reporters.contains(&rank)
    }

    /// Whom nobody reaches.
    fn unreached(&self) -> BTreeSet<Rank> {
        let missed = |reach: &Reach| matches!(reach, Reach::Mute | Reach::Unreachable);
        let missed = self.reach.iter().filter(|(_, reach)| missed(reach)).map(|((_, to), _)| *to);
        missed.filter(|rank| !self.is_there(*rank)).collect()
    }

    /// Whether nobody who has not answered yet can say that it reaches a rank after all: that one had its time to answer, and a neighbour
    /// or two of different hosts have tried.
    fn is_surely_unreached(&self, rank: Rank) -> bool {
        let tried: BTreeSet<String> = self
            .reach
            .keys()
            .filter(|(by, to)| *to == rank && *by != rank)
            .map(|(by, _)| self.host(*by))
            .collect();
        let enough = tried.len() >= 2 || tried.contains(&self.host(rank));
        self.still_looking.is_empty() || enough && !self.still_looking.contains(&rank)
    }

    fn judge_unreached(&self) -> Option<Abort> {
        let unreached = self.unreached();
        // Of the others we only know that we do not reach them.
        let worst = self.most_blamed(&unreached.intersection(&self.looked_for).copied().collect())?;
        let (mine, none) = (self.host(self.me), "nothing was outstanding with it");
        if !self.is_surely_unreached(worst) {
            return Some(self.unsure(worst));
        }
        let far = |rank: &&Rank| self.host(**rank) != mine;
        let not_even_its_host = |rank: &Rank| {
            let mut tries = self.reach.iter().filter(|((_, to), _)| to == rank).map(|(_, reach)| *reach);
            tries.all(|reach| reach == Reach::Unreachable)
        };
        let heard_far = self.hosts.keys().filter(far).any(|rank| self.answers(*rank));
        let there: BTreeSet<String> = unreached.iter().filter(far).map(|rank| self.host(*rank)).collect();
        let all_dark = unreached.iter().filter(far).all(not_even_its_host);
        if self.host(worst) != mine && !heard_far && all_dark {
            let text = self.faults.get(&self.me).or(self.faults.values().next()).map(|fault| &fault.text);
            let seen = text.map_or(String::new(), |text| format!("; {text}"));
            return Some(match there.len() {
                1 => self.either(
                    self.me,
                    worst,
                    format!("neither reaches the other, and there is no third host to ask{seen}"),
                ),
                _ => self.abort(self.me, format!("is cut off: no rank of another host answers{seen}")),
            });
        }
        let seen = self.witness(worst).or_else(|| self.witness(self.end_of_chain()?));
        let seen = seen.unwrap_or_else(|| none.into());
        let third = self
            .reach
            .keys()
            .any(|(by, to)| *to == worst && ![mine.clone(), self.host(worst)].contains(&self.host(*by)));
        if self.host(worst) != mine && !third && not_even_its_host(&worst) {
            let text = format!("neither reaches the other, and nobody of a third host has tried; {seen}");
            return Some(self.either(self.me, worst, text));
        }
        Some(self.abort(worst, format!("does not answer; {seen}")))
    }

    /// Two that do not reach each other, though others reach both.
    fn judge_ways(&self) -> Option<Abort> {
        let cut = |((from, to), reach): &(&(Rank, Rank), &Reach)| {
            **reach == Reach::Unreachable && from != to && self.is_there(*to) && self.is_there(*from)
        };
        let cuts: Vec<(Rank, Rank)> = self.reach.iter().filter(cut).map(|(pair, _)| *pair).collect();
        let waited = |(a, b): &&(Rank, Rank)| {
            let blames =
                |x: &Rank, y: &Rank| self.faults.get(x).is_some_and(|fault| fault.blames == Some(*y));
            blames(a, b) || blames(b, a)
        };
        let &(a, b) = cuts.iter().find(waited).or(cuts.first())?;
        let seen = self.witness(b).or_else(|| self.witness(a));
        let seen = seen.map_or(String::new(), |seen| format!("; {seen}"));
        Some(self.either(a, b, format!("they do not reach each other, though others reach both{seen}")))
    }

    /// All answer: the end of the chain of those who wait.
    fn judge_chain(&self) -> Option<Abort> {
        let end = self.end_of_chain().or_else(|| self.silent.keys().next().copied())?;
        let owns_up = |fault: &&Fault| !fault.hearsay && fault.blames.is_none_or(|blamed| blamed == end);
        if let Some(fault) = self.faults.get(&end).filter(owns_up) {
            return Some(self.abort(end, format!("failed: {}", fault.text)));
        }
        if !self.still_looking.is_empty() {
            return Some(self.unsure(end));
        }
        let seen = self.witness(end).or_else(|| Some(self.faults.get(&end)?.text.clone()));
        let seen = seen.or_else(|| self.silent.get(&end).cloned());
        Some(self.abort(end, format!("is at fault: {}", seen.unwrap_or_else(|| "it said nothing".into()))))
    }

    /// Among some, whom others waited for.
    fn most_blamed(&self, among: &BTreeSet<Rank>) -> Option<Rank> {
        let blamed = |rank: &&Rank| self.faults.values().any(|fault| fault.blames == Some(**rank));
        let silent = || among.iter().find(|rank| self.silent.contains_key(rank));
        among.iter().find(blamed).or_else(silent).or(among.first()).copied()
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

    /// Led by r0. Ranks 0 and 1 on the first host, 2 and 3 on the second, and so on; those not silent answer r0.
    fn evidence(lost: &[u32], silent: &[u32], faults: &[(u32, Option<u32>)]) -> Evidence {
        let fault = |blames: Option<u32>| Fault {
            blames: blames.map(Rank),
            hearsay: false,
            text: "recv w, 8 B left".into(),
        };
        let reach = |r: &u32| match silent.contains(r) {
            true => Reach::Unreachable,
            false => Reach::Answers,
        };
        Evidence {
            me: Rank(0),
            lost_by: lost.iter().map(|r| (Rank(0), Rank(*r))).collect(),
            nonsense: BTreeMap::new(),
            lost: lost.iter().map(|r| (Rank(*r), (DIED.to_string(), 0))).collect(),
            silent: silent.iter().map(|r| (Rank(*r), "r0 heard nothing".into())).collect(),
            faults: faults.iter().map(|(r, blames)| (Rank(*r), fault(*blames))).collect(),
            order: faults.iter().map(|(r, _)| Rank(*r)).collect(),
            reporters: faults.iter().map(|(r, _)| Rank(*r)).collect(),
            hosts: (0..8).map(|r| (Rank(r), format!("h{}", r / 2))).collect(),
            looked_for: silent.iter().map(|r| Rank(*r)).collect(),
            reach: (1..8)
                .filter(|r| !lost.contains(r))
                .flat_map(|r| tried_by(r, silent).map(move |by| ((by, Rank(r)), reach(&r))))
                .collect(),
            still_looking: BTreeSet::new(),
        }
    }

    /// r0, and somebody of a third host, where anybody is left there.
    fn tried_by(rank: u32, silent: &[u32]) -> impl Iterator<Item = Rank> {
        let third = (2..8).find(|r| r / 2 != rank / 2 && !silent.contains(r));
        [Some(0), third.filter(|_| silent.contains(&rank))].into_iter().flatten().map(Rank)
    }

    fn verdict(evidence: &Evidence) -> Option<(u32, String)> {
        evidence.judge().map(|abort| (abort.culprit.0, abort.text))
    }

    fn culprit(lost: &[u32], silent: &[u32], faults: &[(u32, Option<u32>)]) -> Option<u32> {
        verdict(&evidence(lost, silent, faults)).map(|(rank, _)| rank)
    }

    #[test]
    fn the_end_of_the_chain_is_at_fault() {
        assert_eq!(culprit(&[], &[], &[(0, Some(1)), (1, Some(4)), (7, Some(0))]), Some(4));
        assert_eq!(culprit(&[], &[], &[(3, None), (0, Some(3))]), Some(3));
        assert_eq!(culprit(&[], &[], &[]), None);
        // In a cycle the one who found out first is right: r2 heard nonsense and hung up, and r3 saw that.
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
    fn a_connection_that_both_ends_lost_accuses_neither() {
        let mut broken = evidence(&[], &[], &[]);
        broken.add_lost(Rank(4), Rank(2), DIED.into());
        assert_eq!(verdict(&broken).unwrap().0, 2);
        broken.add_lost(Rank(2), Rank(4), DIED.into());
        let text = broken.judge().unwrap().to_string();
        assert!(text.starts_with("cannot tell between r2 on h1 and r4 on h2: their connection"), "{text}");
        // Somebody else is really gone; or one of them knows that it was its own end; or said nonsense.
        let mut dead = broken.clone();
        dead.add_lost(Rank(0), Rank(7), DIED.into());
        assert_eq!(verdict(&dead).unwrap().0, 7);
        let mut owns_up = evidence(&[], &[], &[]);
        owns_up.add_lost(Rank(2), Rank(4), DIED.into());
        owns_up.add_fault(Rank(4), Fault { blames: None, hearsay: false, text: "closed here".into() });
        owns_up.add_lost(Rank(3), Rank(4), DIED.into());
        assert_eq!(verdict(&owns_up), Some((4, "failed: closed here".into())));
        broken.add_nonsense(Rank(4), "babbles".into());
        assert_eq!(verdict(&broken), Some((4, "babbles; nothing was outstanding with it".into())));
    }

    #[test]
    fn a_host_that_says_nobody_is_there_tells_of_a_death() {
        let mut dead = evidence(&[], &[], &[(1, Some(2))]);
        dead.reach.insert((Rank(0), Rank(2)), Reach::Refused);
        assert_eq!(verdict(&dead).unwrap().0, 2);
        // But who has reported may have ended since.
        dead.add_fault(Rank(2), Fault { blames: Some(Rank(5)), hearsay: false, text: "x".into() });
        assert_eq!(verdict(&dead).unwrap().0, 5);
    }

    #[test]
    fn who_does_not_answer_is_at_fault() {
        // r2 forwards for r3, which was stopped, and is blamed for it before it finds out.
        assert_eq!(culprit(&[], &[3], &[(0, Some(2)), (1, Some(2))]), Some(3));
        assert_eq!(culprit(&[], &[3, 5], &[(0, Some(5))]), Some(5));
        assert_eq!(
            verdict(&evidence(&[], &[6], &[])),
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
        // A process that was stopped is none whose host was cut off.
        let mut stopped = all;
        stopped.reach.values_mut().filter(|r| **r == Reach::Unreachable).for_each(|r| *r = Reach::Mute);
        assert_eq!(verdict(&stopped).unwrap().0, 2);
    }

    #[test]
    fn with_two_hosts_there_is_no_telling_which_is_cut_off() {
        let mut two = evidence(&[], &[2, 3], &[(0, Some(2))]);
        two.hosts.retain(|rank, _| rank.0 < 4);
        two.reach.retain(|(_, to), _| to.0 < 4);
        let text = two.judge().unwrap().to_string();
        assert!(text.starts_with("cannot tell between r0 on h0 and r2 on h1: neither reaches"), "{text}");
    }

    #[test]
    fn a_way_that_is_cut_has_two_ends() {
        // r2 waits for r4, which has long sent everything; r0 and r6 reach both.
        let mut cut = evidence(&[], &[], &[(2, Some(4)), (3, Some(2))]);
        cut.reach.insert((Rank(2), Rank(4)), Reach::Unreachable);
        cut.reach.insert((Rank(6), Rank(4)), Reach::Answers);
        let text = cut.judge().unwrap().to_string();
        assert!(text.starts_with("cannot tell between r2 on h1 and r4 on h2: they do not reach"), "{text}");
    }

    #[test]
    fn one_hosts_word_about_another_is_not_enough() {
        // Their host reaches all others, and nobody else has tried.
        let mut unsure = evidence(&[], &[2], &[]);
        unsure.reach.retain(|(by, _), _| *by == Rank(0));
        let text = unsure.judge().unwrap().to_string();
        assert!(text.starts_with("cannot tell between r0 on h0 and r2 on h1: neither reaches"), "{text}");
        // One that takes the connection and says nothing was stopped; its host is well.
        unsure.reach.insert((Rank(0), Rank(2)), Reach::Mute);
        assert_eq!(verdict(&unsure).unwrap().0, 2);
    }

    #[test]
    fn while_somebody_still_looks_nobody_is_named_who_may_be_innocent() {
        // r4 waits for r2, and has not said yet whether it reaches it.
        let sure = evidence(&[], &[], &[(4, Some(2))]);
        assert_eq!(verdict(&sure).unwrap().0, 2);
        let mut unsure = sure.clone();
        unsure.still_looking.insert(Rank(4));
        let text = unsure.judge().unwrap().to_string();
        assert!(text.starts_with("cannot tell between r2 on h1 and r4 on h2: r4 did not answer"), "{text}");
        // The same where the end of the chain is who leads, or all is hearsay.
        let mut leads = evidence(&[], &[], &[(4, Some(0))]);
        leads.still_looking.insert(Rank(6));
        let text = leads.judge().unwrap().to_string();
        assert!(text.starts_with("cannot tell between r0 on h0 and r4 on h2: r6 did not answer"), "{text}");
        unsure.faults.get_mut(&Rank(4)).unwrap().hearsay = true;
        let text = unsure.judge().unwrap().to_string();
        assert!(text.starts_with("cannot tell between r2 on h1 and r4 on h2: r4 did not answer"), "{text}");
        // Its own word, a death, or nonsense is certain.
        unsure.add_fault(Rank(2), Fault { blames: None, hearsay: false, text: "no memory".into() });
        assert_eq!(verdict(&unsure), Some((2, "failed: no memory".into())));
        unsure.add_lost(Rank(0), Rank(7), DIED.into());
        assert_eq!(verdict(&unsure).unwrap().0, 7);
        unsure.add_nonsense(Rank(5), "babbles".into());
        assert_eq!(verdict(&unsure).unwrap().0, 5);
    }

    #[test]
    fn silence_is_proven_by_two_hosts_or_a_neighbour() {
        // r0 of h0 does not reach r4; whoever else was sent has not answered.
        let mut unsure = evidence(&[], &[4], &[(2, Some(4))]);
        unsure.reach.retain(|(by, _), _| *by == Rank(0));
        unsure.reach.insert((Rank(0), Rank(4)), Reach::Mute);
        assert_eq!(verdict(&unsure).unwrap().0, 4);
        unsure.still_looking.extend([Rank(2), Rank(6)]);
        let text = unsure.judge().unwrap().to_string();
        assert!(text.starts_with("cannot tell between r2 on h1 and r4 on h2: r2, r6 did not"), "{text}");
        for by in [Rank(6), Rank(5)] {
            let mut sure = unsure.clone();
            sure.reach.insert((by, Rank(4)), Reach::Mute);
            assert_eq!(verdict(&sure).unwrap().0, 4, "{by} says so too");
            // But not before it had its time to answer.
            sure.still_looking.insert(Rank(4));
            assert!(sure.judge().unwrap().or.is_some());
        }
    }

    #[test]
    fn who_was_sent_to_look_answers_for_everybody() {
        let mut sent = evidence(&[], &[2, 4], &[]);
        sent.reach.clear();
        assert!(!sent.has_seen_all(Rank(6)));
        sent.reach.insert((Rank(6), Rank(4)), Reach::Answers);
        assert!(!sent.has_seen_all(Rank(6)));
        sent.reach.insert((Rank(6), Rank(2)), Reach::Mute);
        assert!(sent.has_seen_all(Rank(6)));
        sent.reach.insert((Rank(2), Rank(4)), Reach::Answers);
        assert!(sent.has_seen_all(Rank(2)), "nobody is asked whether it reaches itself");
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
        assert_eq!(evidence(&[2], &[], &[]).settles_after_ns(), SETTLE_DEATH_NS);
        assert_eq!(evidence(&[2], &[], &[(1, Some(2))]).settles_after_ns(), SETTLE_SEEN_NS);
        let mut slow = evidence(&[], &[2], &[(1, Some(2))]);
        assert_eq!(slow.settles_after_ns(), SETTLE_FAULT_NS);
        slow.still_looking.insert(Rank(4));
        assert_eq!(slow.settles_after_ns(), SETTLE_DEATH_NS);
    }
}
