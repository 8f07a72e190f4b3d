//! What a rank does when something is wrong: it tells the root; where the root is gone, the first deputy that is left.
//! Whoever leads has everybody concerned looked for, by several others, and says who is at fault.
//!
//! ```text
//! r5 ── trouble ──▶ parent ──▶ root                    all is well but for somebody else
//! r5 ── look ──▶ root and deputies ── alive ──▶ r5     the parent is gone: who is left, and hears the root?
//! r5 ── trouble ──▶ one of them                        who passes it on to the root, or leads
//! leader ── look at r7 ──▶ r5, deputies ── seen ──▶    is it r7, or the way to it?
//! leader ── abort ──▶ everybody
//! ```

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::id::Rank;

use super::ask::{Asking, Looking, Why};
use super::{Heard, LinkId, MAX_SUSPECTS, MS, Node};
use crate::rendezvous::blame::Evidence;
use crate::rendezvous::message::{Notice, Reach, Report, Say};
use crate::rendezvous::{Abort, Entry, Fault};

/// An inquiry takes no longer than its questions, and this.
const INQUIRY_NS: u64 = 700 * MS;
/// Without a verdict for so long, we say what we saw.
const VERDICT_NS: u64 = 2_500 * MS;
const MAX_REPORTERS: usize = 8;
/// Hosts of which somebody is asked, to tell a host that is cut off from the way between two.
const MAX_REFEREES: usize = 4;
const MAX_ELECTIONS: u32 = 6;
/// Others notice a loss at about the same time: before that, they know no better than we do.
pub(super) const NOTICE_NS: u64 = 30 * MS;

#[derive(Debug, Default)]
pub(super) struct Trouble {
    /// What was noticed and not judged yet.
    pub pending: Vec<Report>,
    pub since_ns: Option<u64>,
    pub election: Option<Election>,
    /// When the next begins.
    pub elect_ns: Option<u64>,
    pub elections: u32,
    /// Who turned to us, in place of its parent.
    pub appellants: BTreeSet<LinkId>,
    /// Who was asked to judge, in place of the parent.
    pub appealed: Option<LinkId>,
    /// Where we lead.
    pub lead: Option<Lead>,
    pub asking: BTreeMap<LinkId, Asking>,
    /// Whom we look for, by who asked us to.
    pub looking: BTreeMap<LinkId, Looking>,
}

/// Who is left?
#[derive(Debug, Default)]
pub(super) struct Election {
    pub waiting: BTreeSet<Rank>,
    pub answered: BTreeMap<Rank, (LinkId, bool)>,
    pub failed: BTreeMap<Rank, Reach>,
}

#[derive(Debug)]
pub(super) struct Lead {
    pub evidence: Evidence,
    pub since_ns: Option<u64>,
    pub looked: BTreeSet<Rank>,
}

impl Trouble {
    pub fn is_active(&self) -> bool {
        let leads = self.lead.as_ref().is_some_and(|lead| lead.since_ns.is_some());
        leads || self.since_ns.is_some() || self.asking.values().any(|asking| !asking.answered)
    }

    pub fn note(&mut self, entry: &Entry) {
        if let Some(lead) = &mut self.lead {
            lead.evidence.hosts.insert(entry.rank, entry.host.clone());
        }
    }
}

impl Node {
    /// From now on, this rank judges.
    pub(super) fn lead(&mut self, _now: u64) {
        let mut evidence = Evidence::new(self.me.rank);
        evidence.hosts = self.known.values().map(|entry| (entry.rank, entry.host.clone())).collect();
        self.trouble.lead.get_or_insert(Lead { evidence, since_ns: None, looked: BTreeSet::new() });
    }

    /// The rank's own part of the job has failed.
    pub(super) fn fail(&mut self, now: u64, fault: Fault) {
        let entry = |rank: Rank| self.known.get(&rank).cloned().unwrap_or(Entry { rank, ..Entry::unknown() });
        let about = fault.blames.map(entry);
        self.report(now, about, Notice::Fault(fault));
    }

    pub(super) fn on_trouble(&mut self, now: u64, link: LinkId, report: Report) {
        if self.asked.contains_key(&link) {
            self.trouble.appellants.insert(link);
        }
        self.consider(now, report);
    }

    /// We do not hear the root any more: whoever turned to us because we did looks for somebody else.
    pub(super) fn lose_the_root(&mut self) {
        let rank = self.me.rank;
        for link in std::mem::take(&mut self.trouble.appellants) {
            self.send(link, Say::Alive { rank, root: false });
        }
    }

    /// Something is wrong: on to whoever judges.
    pub(super) fn consider(&mut self, now: u64, report: Report) {
        if self.verdict.is_some() {
            return;
        }
        for entry in [Some(&report.by), report.about.as_ref()].into_iter().flatten() {
            if entry.is_known() {
                self.note(&entry.clone());
            }
        }
        if let Some(abort) = self.own_absence(now) {
            return self.conclude(now, abort, None);
        }
        if self.trouble.lead.is_some() {
            return self.take_evidence(now, report);
        }
        self.trouble.since_ns.get_or_insert(now);
        self.trouble.pending.push(report.clone());
        match self.trouble.appealed {
            Some(link) => self.send(link, Say::Trouble(report)),
            None if self.up_is_well(now) => self.send_up(Say::Trouble(report)),
            None => {
                self.trouble.elect_ns.get_or_insert(now + NOTICE_NS);
            }
        }
    }

    /// Who is left, and hears the root?
    fn elect(&mut self, now: u64) {
        if self.trouble.election.is_some() || self.trouble.lead.is_some() || self.trouble.appealed.is_some() {
            return;
        }
        if self.trouble.elections >= MAX_ELECTIONS {
            return self.judge_alone(now);
        }
        self.trouble.elections += 1;
        let lost = self.trouble.pending.iter().filter(|r| !matches!(r.what, Notice::Fault(_)));
        let mut out: BTreeSet<Rank> = lost.filter_map(|r| Some(r.about.as_ref()?.rank)).collect();
        out.extend(self.up.as_ref().map(|up| up.entry.rank).into_iter().chain([self.me.rank]));
        let voters: Vec<Entry> = self.deputies.iter().filter(|e| !out.contains(&e.rank)).cloned().collect();
        let waiting = voters.iter().map(|entry| entry.rank).collect();
        self.trouble.election = Some(Election { waiting, ..Election::default() });
        voters.iter().for_each(|entry| self.ask(now, entry, Why::Elect));
        self.count_votes(now);
    }

    /// Turns to the root, to somebody who hears it, or else to the first deputy.
    pub(super) fn count_votes(&mut self, now: u64) {
        let Some(election) = &self.trouble.election else { return };
        let root = self.deputies.first().map(|entry| entry.rank);
        let hears =
            election.answered.iter().find(|(rank, (_, root_heard))| Some(**rank) == root || *root_heard);
        let over = hears.is_some() || election.waiting.is_empty();
        if !over {
            return;
        }
        let candidates = self.deputies.iter().map(|entry| entry.rank);
        let stands = |rank: &Rank| *rank == self.me.rank || election.answered.contains_key(rank);
        let first = candidates
            .filter(stands)
            .find(|rank| Some(*rank) != root || election.answered.contains_key(rank));
        let chosen = hears.map(|(rank, _)| *rank).or(first).filter(|rank| *rank != self.me.rank);
        let election = self.trouble.election.take().expect("just looked at");
        match chosen {
            Some(rank) => self.appeal(election.answered[&rank].0),
            None => self.take_the_lead(now, election),
        }
    }

    fn appeal(&mut self, link: LinkId) {
        self.trouble.appealed = Some(link);
        for report in self.trouble.pending.clone() {
            self.send(link, Say::Trouble(report));
        }
    }

    fn take_the_lead(&mut self, now: u64, election: Election) {
        self.lead(now);
        let me = self.me.rank;
        let lead = self.trouble.lead.as_mut().expect("just made");
        for (rank, reach) in election.failed {
            lead.evidence.reach.insert((me, rank), reach);
            lead.looked.insert(rank);
        }
        for (rank, (link, _)) in election.answered {
            lead.evidence.reach.insert((me, rank), Reach::Answers);
            lead.looked.insert(rank);
            self.trouble.asking.get_mut(&link).into_iter().for_each(|asking| asking.why = Why::Inquire);
        }
        for report in std::mem::take(&mut self.trouble.pending) {
            self.take_evidence(now, report);
        }
    }

    fn take_evidence(&mut self, now: u64, report: Report) {
        let Some(lead) = &mut self.trouble.lead else { return };
        lead.since_ns.get_or_insert(now);
        lead.evidence.reporters.insert(report.by.rank);
        match (report.what, report.about) {
            (Notice::Fault(fault), _) => lead.evidence.add_fault(report.by.rank, fault),
            (Notice::Lost(how), Some(about)) => lead.evidence.add_lost(report.by.rank, about.rank, how),
            (Notice::Nonsense(how), Some(about)) => lead.evidence.add_nonsense(about.rank, how),
            (Notice::Silent { silent_ms, reach }, Some(about)) => {
                let (by, to) = (report.by.rank, about.rank);
                let seen = format!("{by} heard nothing of it for {silent_ms} ms");
                lead.evidence.silent.entry(to).or_insert(seen);
                lead.evidence.reach.entry((by, to)).or_insert(reach);
                if by == self.me.rank {
                    // There is no need to ask it again.
                    lead.looked.insert(to);
                }
            }
            (_, None) => {}
        }
        self.inquire(now);
    }

    /// Has everybody concerned looked for.
    fn inquire(&mut self, now: u64) {
        let Some(lead) = &mut self.trouble.lead else { return };
        let me = self.me.rank;
        let reachable = |rank: &Rank| self.known.get(rank).is_some_and(Entry::is_known);
        let new: Vec<Rank> = lead.evidence.suspects().into_iter().filter(|r| reachable(r)).collect();
        let new: Vec<Rank> = new.into_iter().filter(|r| !lead.evidence.looked_for.contains(r)).collect();
        let room = MAX_SUSPECTS.saturating_sub(lead.evidence.looked_for.len());
        let new: Vec<Rank> = new.into_iter().take(room).collect();
        lead.evidence.looked_for.extend(new.iter().copied());
        let reporters = lead.evidence.reporters.iter().take(MAX_REPORTERS).copied();
        let deputies = self.deputies.iter().map(|entry| entry.rank);
        let mut asked: BTreeSet<Rank> =
            lead.evidence.looked_for.iter().copied().chain(reporters).chain(deputies).collect();
        asked.extend(self.referees(&asked));
        let Some(lead) = &mut self.trouble.lead else { return };
        asked.retain(|rank| *rank != me && reachable(rank) && !lead.looked.contains(rank));
        lead.looked.extend(asked.iter().copied());
        let observers: Vec<LinkId> = self.observers().collect();
        observers.into_iter().for_each(|link| self.send_to_look(now, link, &new));
        for rank in asked {
            let entry = self.known[&rank].clone();
            self.ask(now, &entry, Why::Inquire);
        }
    }

    /// Somebody of each of a few hosts that nobody else of is asked.
    fn referees(&self, asked: &BTreeSet<Rank>) -> Vec<Rank> {
        let host = |rank: &Rank| self.known.get(rank).map(|entry| entry.host.as_str());
        let mut hosts: BTreeSet<&str> =
            asked.iter().filter_map(host).chain([self.me.host.as_str()]).collect();
        let known = self.known.values().filter(|entry| entry.is_known());
        let others = known.filter(|entry| hosts.insert(&entry.host)).map(|entry| entry.rank);
        others.take(MAX_REFEREES).collect()
    }

    /// Neighbours that speak need not be asked.
    fn note_neighbours(&mut self, now: u64) {
        let recent = 3 * self.ping_ns();
        let up = self.up.iter().map(|up| (up.entry.rank, &up.vigil));
        let down = self.down.values().map(|down| (down.entry.rank, &down.vigil));
        let heard = up.chain(down).filter(|(_, vigil)| now.saturating_sub(vigil.heard_ns) <= recent);
        let (me, heard): (Rank, Vec<Rank>) = (self.me.rank, heard.map(|(rank, _)| rank).collect());
        if let Some(lead) = &mut self.trouble.lead {
            heard
                .iter()
                .for_each(|rank| _ = lead.evidence.reach.entry((me, *rank)).or_insert(Reach::Answers));
        }
    }

    pub(super) fn look_into_trouble(&mut self, now: u64) {
        self.give_up_questions(now);
        if self.trouble.elect_ns.take_if(|at| now >= *at).is_some() {
            self.elect(now);
        }
        self.judge(now);
        let waits = self.trouble.lead.is_none() && self.verdict.is_none();
        // As long as the root is heard, it will say.
        let limit_ns = if self.hears_root(now) { 4 * VERDICT_NS } else { VERDICT_NS };
        if waits && self.trouble.since_ns.is_some_and(|since| now >= since + limit_ns) {
            self.judge_alone(now);
        }
    }

    /// Whether it is clear who is at fault.
    fn judge(&mut self, now: u64) {
        let Trouble { lead, asking, .. } = &mut self.trouble;
        let Some((lead, since)) = lead.as_mut().and_then(|lead| lead.since_ns.map(|since| (lead, since)))
        else {
            return;
        };
        let late = asking.values().filter(|a| a.why == Why::Inquire && !a.answered);
        lead.evidence.still_looking = late.map(|a| a.rank).collect();
        let looked = lead.evidence.still_looking.is_empty();
        let all = self
            .root
            .as_ref()
            .is_some_and(|root| lead.evidence.faults.len() + lead.evidence.lost.len() >= root.size());
        let clear = lead.evidence.is_clear_without_a_look() || looked;
        let settled = now >= since + lead.evidence.settles_after_ns() && clear;
        let over = now >= since + self.probe_ns() + INQUIRY_NS;
        if !(over || settled || all && looked) {
            return;
        }
        self.note_neighbours(now);
        let verdict = self.trouble.lead.as_ref().and_then(|lead| lead.evidence.judge());
        verdict.into_iter().for_each(|abort| self.conclude(now, abort, None));
    }

    /// Nobody says who it was. What we saw is all there is, and not enough to name anybody.
    fn judge_alone(&mut self, now: u64) {
        let report = self.trouble.pending.iter().find(|report| report.by.rank == self.me.rank);
        let Some(report) = report.or(self.trouble.pending.first()) else { return };
        let text = match &report.what {
            Notice::Fault(fault) => fault.text.clone(),
            Notice::Lost(how) | Notice::Nonsense(how) => format!("the connection is gone ({how})"),
            Notice::Silent { silent_ms, .. } => format!("nothing was heard for {silent_ms} ms"),
        };
        let me = (self.me.rank, self.me.host.clone());
        let abort = match report.about.as_ref().filter(|about| about.rank != self.me.rank) {
            Some(about) => Abort::either(
                me,
                (about.rank, about.host.clone()),
                format!("nobody else is left to ask; {text}"),
            ),
            None => Abort::new(me.0, me.1, format!("failed: {text}")),
        };
        self.conclude(now, abort, None);
    }

    /// The job is over. Everybody who can be reached hears so.
    pub(super) fn conclude(&mut self, now: u64, abort: Abort, from: Option<LinkId>) {
        if self.verdict.is_some() {
            return;
        }
        self.verdict = Some(abort.clone());
        let asking = self.trouble.asking.iter().filter(|(_, a)| a.connected).map(|(link, _)| *link);
        let coming = self.root.iter().flat_map(|root| root.links());
        let links = self.down.keys().chain(self.asked.keys()).copied().chain(asking).chain(coming);
        let mut links: BTreeSet<LinkId> = links.chain(self.up.as_ref().map(|up| up.link)).collect();
        links.retain(|link| Some(*link) != from);
        links.into_iter().for_each(|link| self.send(link, Say::Abort(abort.clone())));
        for entry in self.out_of_touch(&abort) {
            self.ask(now, &entry, Why::Deliver);
        }
        self.tell(Heard::Abort(abort));
    }

    /// Where we lead: those whom the tree does not reach.
    fn out_of_touch(&self, abort: &Abort) -> Vec<Entry> {
        let Some(lead) = &self.trouble.lead else { return vec![] };
        let broken =
            lead.evidence.suspects().into_iter().chain([abort.culprit]).chain(abort.or.iter().map(|o| o.0));
        let broken: BTreeSet<Rank> = broken.collect();
        if let Some(root) = &self.root {
            let mut below: Vec<Entry> = broken.iter().flat_map(|rank| root.below(*rank)).collect();
            below.sort_by_key(|entry| entry.rank);
            below.dedup_by_key(|entry| entry.rank);
            return below;
        }
        let asked = self.trouble.asking.values().filter(|a| a.connected).map(|a| a.rank);
        let told: BTreeSet<Rank> = asked.chain([self.me.rank]).collect();
        self.deputies.iter().filter(|entry| !told.contains(&entry.rank)).cloned().collect()
    }
}
