//! Questions to others, and what comes of them: are you there, where is somebody, do you reach these?

use crossmesh_core::id::Rank;

use super::trouble::NOTICE_NS;
use super::{Heard, LinkId, MAX_SUSPECTS, MS, Node};
use crate::auth::Role;
use crate::rendezvous::Entry;
use crate::rendezvous::message::{Notice, Reach, Say};

/// Who does not answer a question within this time does not answer; more where ranks are more patient anyway.
const SHORTEST_PROBE_NS: u64 = 500 * MS;
const LONGEST_PROBE_NS: u64 = 1_000 * MS;
/// What others look for takes a little longer.
const SEEN_NS: u64 = 100 * MS;
/// To ask the root for addresses; it may be busy with everybody else, and is asked again while it is heard.
const WHERE_NS: u64 = 2_000 * MS;
const LONGEST_WHERE_NS: u64 = 10_000 * MS;
const WHERE_TRIES: u32 = 20;

/// A question of ours.
#[derive(Debug)]
pub(super) struct Asking {
    pub rank: Rank,
    pub by_ns: u64,
    pub connected: bool,
    /// Nothing more is expected.
    pub answered: bool,
    pub why: Why,
}

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Why {
    /// One that is silent on its own link: is it there?
    Check {
        link: LinkId,
    },
    Elect,
    Inquire,
    Probe {
        asker: LinkId,
    },
    Deliver,
    Where {
        wanted: Vec<Rank>,
        missing: Vec<Rank>,
        tries: u32,
    },
}

#[derive(Debug)]
pub(super) struct Looking {
    pub left: usize,
    pub seen: Vec<(Rank, Reach)>,
}

impl Node {
    pub(super) fn probe_ns(&self) -> u64 {
        (self.limits.silence_ns / 2).clamp(SHORTEST_PROBE_NS, LONGEST_PROBE_NS)
    }

    /// Asks somebody who is silent on its own link. One whose address is not known cannot be asked.
    pub(super) fn check(&mut self, now: u64, link: LinkId, entry: &Entry) {
        match entry.is_known() {
            true => self.ask(now, entry, Why::Check { link }),
            false => self.checked(now, link, Reach::Unreachable),
        }
    }

    pub(super) fn ask(&mut self, now: u64, entry: &Entry, why: Why) {
        let patience = match why {
            Why::Where { .. } => self.limits.silence_ns.clamp(WHERE_NS, LONGEST_WHERE_NS),
            _ => self.probe_ns(),
        };
        let by_ns = now + patience;
        let link = self.dial(entry, Role::Ask, by_ns);
        let asking = Asking { rank: entry.rank, by_ns, connected: false, answered: false, why };
        self.trouble.asking.insert(link, asking);
    }

    pub(super) fn ask_where(&mut self, now: u64, wanted: Vec<Rank>, missing: Vec<Rank>) {
        if let Some(root) = self.deputies.first().cloned() {
            self.ask(now, &root, Why::Where { wanted, missing, tries: 0 });
        }
    }

    /// Those who have answered, and can look for others.
    pub(super) fn observers(&self) -> impl Iterator<Item = LinkId> {
        let asking = self.trouble.asking.iter().filter(|(_, a)| a.why == Why::Inquire && a.connected);
        asking.map(|(link, _)| *link)
    }

    pub(super) fn send_to_look(&mut self, now: u64, link: LinkId, suspects: &[Rank]) {
        let probe_ns = self.probe_ns();
        let Some(asking) = self.trouble.asking.get_mut(&link) else { return };
        let at: Vec<Entry> =
            suspects.iter().filter(|r| **r != asking.rank).map(|r| self.known[r].clone()).collect();
        if !at.is_empty() {
            (asking.answered, asking.by_ns) = (false, now + probe_ns + SEEN_NS);
            self.send(link, Say::Look { at });
        }
    }

    /// A dial of ours has ended.
    pub(super) fn on_asking(&mut self, now: u64, link: LinkId, result: Result<(), Reach>) {
        if let Err(reach) = result {
            return self.resolve(now, link, reach);
        }
        let Some(asking) = self.trouble.asking.get_mut(&link) else { return };
        asking.connected = true;
        let suspects = self.trouble.lead.iter().flat_map(|lead| lead.evidence.looked_for.iter().copied());
        match asking.why.clone() {
            Why::Inquire => {
                let rank = asking.rank;
                let at =
                    suspects.filter(|r| *r != rank).filter_map(|r| self.known.get(&r).cloned()).collect();
                self.send(link, Say::Look { at });
            }
            Why::Check { .. } | Why::Elect | Why::Probe { .. } => self.send(link, Say::Look { at: vec![] }),
            Why::Where { missing, .. } => self.send(link, Say::Where(missing)),
            Why::Deliver => {
                let verdict = self.verdict.clone();
                verdict.into_iter().for_each(|abort| self.send(link, Say::Abort(abort)));
                self.trouble.asking.remove(&link);
            }
        }
    }

    /// Somebody wants to know whether we are here, and whom we reach.
    pub(super) fn on_look(&mut self, now: u64, link: LinkId, at: Vec<Entry>) {
        let (rank, root) = (self.me.rank, self.hears_root(now));
        self.send(link, Say::Alive { rank, root });
        // However often it is asked, nobody makes us look for more at a time.
        let room = MAX_SUSPECTS - self.trouble.looking.get(&link).map_or(0, |looking| looking.left);
        let at: Vec<Entry> = at.into_iter().filter(|e| e.rank != rank && e.is_known()).take(room).collect();
        if at.is_empty() {
            return;
        }
        let looking = self.trouble.looking.entry(link).or_insert(Looking { left: 0, seen: vec![] });
        looking.left += at.len();
        at.iter().for_each(|entry| self.ask(now, entry, Why::Probe { asker: link }));
    }

    pub(super) fn on_answer(&mut self, now: u64, link: LinkId, say: Say) {
        let Some(asking) = self.trouble.asking.get_mut(&link) else { return };
        let (me, rank) = (self.me.rank, asking.rank);
        if let Say::Alive { rank: by, .. } | Say::Seen { by, .. } = say
            && by != rank
        {
            return self.refuse(now, link, format!("{rank} was asked, and says that it is {by}"));
        }
        let seen_by_ns =
            now + (self.limits.silence_ns / 2).clamp(SHORTEST_PROBE_NS, LONGEST_PROBE_NS) + SEEN_NS;
        match (say, asking.why.clone()) {
            (Say::Alive { root: false, .. }, Why::Elect) if self.trouble.appealed == Some(link) => {
                self.trouble.appealed = None;
                self.trouble.elect_ns = Some(now + NOTICE_NS);
            }
            (Say::Alive { root, .. }, Why::Elect) => {
                asking.answered = true;
                if let Some(election) = &mut self.trouble.election {
                    election.waiting.remove(&rank);
                    election.answered.insert(rank, (link, root));
                }
                self.count_votes(now);
            }
            (Say::Alive { .. }, Why::Inquire) => {
                asking.by_ns = seen_by_ns;
                if let Some(lead) = &mut self.trouble.lead {
                    lead.evidence.reach.insert((me, rank), Reach::Answers);
                    // Where there is somebody else to look at, that is still to come.
                    asking.answered = lead.evidence.has_seen_all(rank);
                }
            }
            (Say::Alive { .. }, Why::Probe { .. } | Why::Check { .. }) => {
                self.resolve(now, link, Reach::Answers)
            }
            (Say::Seen { by, reach }, Why::Inquire) => {
                if let Some(lead) = &mut self.trouble.lead {
                    // Nobody asked about others.
                    let asked = reach.into_iter().filter(|(to, _)| lead.evidence.looked_for.contains(to));
                    let seen: Vec<_> = asked.map(|(to, reach)| ((by, to), reach)).collect();
                    lead.evidence.reach.extend(seen);
                    // It may have been sent again meanwhile.
                    asking.answered = lead.evidence.has_seen_all(rank);
                }
            }
            (Say::Entries(entries), Why::Where { wanted, missing, .. }) => {
                self.trouble.asking.remove(&link);
                self.out.push(super::Action::Close(link));
                let asked = entries.iter().filter(|entry| missing.contains(&entry.rank));
                asked.for_each(|entry| self.note(entry));
                let found = wanted.iter().filter_map(|rank| self.known.get(rank).cloned()).collect();
                self.tell(Heard::Entries(found));
            }
            _ => {}
        }
    }

    pub(super) fn on_asking_closed(&mut self, now: u64, link: LinkId) {
        self.trouble.appellants.remove(&link);
        let looked = self.trouble.looking.remove(&link).is_some();
        if self.trouble.appealed == Some(link) {
            self.trouble.appealed = None;
            self.trouble.asking.remove(&link);
            self.trouble.elect_ns = Some(now + NOTICE_NS);
            return;
        }
        if !looked {
            self.resolve(now, link, Reach::Refused);
        }
    }

    /// A question has its answer, or will have none.
    fn resolve(&mut self, now: u64, link: LinkId, reach: Reach) {
        let Some(asking) = self.trouble.asking.remove(&link) else { return };
        let here = self.known.get(&asking.rank).is_some_and(|entry| entry.host == self.me.host);
        // Its host is ours: it is busy, or does not answer.
        let reach = if here && reach == Reach::Unreachable { Reach::Mute } else { reach };
        if asking.connected {
            self.out.push(super::Action::Close(link));
        }
        let (me, rank) = (self.me.rank, asking.rank);
        match asking.why {
            Why::Elect if !asking.answered => {
                if let Some(election) = &mut self.trouble.election {
                    election.waiting.remove(&rank);
                    election.failed.insert(rank, reach);
                }
                self.count_votes(now);
            }
            Why::Inquire => {
                // One that answered and has not seen others in time is still there.
                if let Some(lead) = &mut self.trouble.lead {
                    lead.evidence.reach.entry((me, rank)).or_insert(reach);
                }
            }
            Why::Probe { asker } => self.saw(asker, rank, reach),
            Why::Check { link } => self.checked(now, link, reach),
            Why::Where { wanted, missing, tries } => {
                self.resolve_where(now, rank, reach, (wanted, missing, tries))
            }
            Why::Elect | Why::Deliver => {}
        }
    }

    fn saw(&mut self, asker: LinkId, rank: Rank, reach: Reach) {
        let Some(looking) = self.trouble.looking.get_mut(&asker) else { return };
        looking.seen.push((rank, reach));
        looking.left -= 1;
        if looking.left == 0 {
            let seen = std::mem::take(&mut looking.seen);
            self.trouble.looking.remove(&asker);
            self.send(asker, Say::Seen { by: self.me.rank, reach: seen });
        }
    }

    /// The root did not say where somebody is: it is busy, or gone.
    fn resolve_where(&mut self, now: u64, root: Rank, reach: Reach, ask: (Vec<Rank>, Vec<Rank>, u32)) {
        let (wanted, missing, tries) = ask;
        let Some(entry) = self.known.get(&root).cloned() else { return };
        // As long as the root is heard, it is busy.
        let most = if reach == Reach::Mute { WHERE_TRIES } else { 1 };
        if tries < most && self.hears_root(now) {
            return self.ask(now, &entry, Why::Where { wanted, missing, tries: tries + 1 });
        }
        let what = match reach {
            Reach::Refused => Notice::Lost("is gone: its host says that nobody is there".into()),
            _ => Notice::Silent { silent_ms: WHERE_NS / MS, reach },
        };
        self.report(now, Some(entry), what);
    }

    /// Questions that nobody answers any more. Dials end by themselves, or a little later here.
    pub(super) fn give_up_questions(&mut self, now: u64) {
        let late = |a: &Asking| !a.answered && now >= a.by_ns + if a.connected { 0 } else { SEEN_NS };
        let late: Vec<LinkId> =
            self.trouble.asking.iter().filter(|(_, a)| late(a)).map(|(l, _)| *l).collect();
        late.into_iter().for_each(|link| self.give_up_asking(now, link));
    }

    fn give_up_asking(&mut self, now: u64, link: LinkId) {
        let Some(asking) = self.trouble.asking.get(&link) else { return };
        let seen = (self.me.rank, asking.rank);
        let there =
            self.trouble.lead.as_ref().is_some_and(|l| l.evidence.reach.get(&seen) == Some(&Reach::Answers));
        if asking.why == Why::Inquire && there {
            // It answers, and takes its time to look for others: until the inquiry is over.
            return;
        }
        let reach = if asking.connected { Reach::Mute } else { Reach::Unreachable };
        self.resolve(now, link, reach);
    }
}
