//! How the tree grows: a rank reports to the root, and is told whom to hang under.

use std::collections::{BTreeMap, BTreeSet};

use crossmesh_core::id::Rank;

use super::{Down, FAN_OUT, Heard, LinkId, MS, Node, Up, Vigil};
use crate::auth::{Refusal, Role};
use crate::rendezvous::message::{Notice, Reach, Say};
use crate::rendezvous::pulse::Pulse;
use crate::rendezvous::{Abort, Entry, RankNames};

/// To reach the parent that the root named.
const MOVE_NS: u64 = 5_000 * MS;

/// What the root knows of everybody.
#[derive(Debug)]
pub(super) struct Root {
    roster: BTreeSet<Rank>,
    /// Those who have proven themselves and not settled yet: their rank, and who they are once they said.
    coming: BTreeMap<LinkId, (Rank, Option<Entry>)>,
    coming_ranks: BTreeSet<Rank>,
    /// In the order in which they came; the root is none of them.
    order: Vec<Rank>,
    /// Where in that order each is.
    places: BTreeMap<Rank, usize>,
    entries: BTreeMap<Rank, Entry>,
    settled: BTreeSet<Rank>,
    /// Why somebody who claimed to be that rank was turned away.
    pub refused: BTreeMap<Rank, Refusal>,
}

impl Root {
    pub fn new(me: Entry, roster: BTreeSet<Rank>) -> Self {
        let settled = BTreeSet::from([me.rank]);
        let entries = BTreeMap::from([(me.rank, me)]);
        let (coming, coming_ranks, places, refused) = Default::default();
        Self { roster, coming, coming_ranks, order: vec![], places, entries, settled, refused }
    }

    pub fn admit(&self, rank: Rank) -> Result<(), Refusal> {
        if !self.roster.contains(&rank) {
            return Err(Refusal::UnknownRank);
        }
        let is_here = self.coming_ranks.contains(&rank) || self.entries.contains_key(&rank);
        if is_here { Err(Refusal::DuplicateRank) } else { Ok(()) }
    }

    pub fn came(&mut self, link: LinkId, rank: Rank) {
        self.coming.insert(link, (rank, None));
        self.coming_ranks.insert(rank);
    }

    /// A connection ended before its rank had settled: that rank, if it had reported.
    pub fn went(&mut self, link: LinkId) -> Option<Entry> {
        self.no_longer_comes(link)?.1
    }

    fn no_longer_comes(&mut self, link: LinkId) -> Option<(Rank, Option<Entry>)> {
        let (rank, entry) = self.coming.remove(&link)?;
        self.coming_ranks.remove(&rank);
        Some((rank, entry))
    }

    /// Those under a rank, and under those.
    pub fn below(&self, rank: Rank) -> Vec<Entry> {
        let mut found: Vec<Entry> = vec![];
        let mut among = BTreeSet::from([rank]);
        for (at, rank) in self.order.iter().enumerate() {
            if self.parent_of(at).is_some_and(|parent| among.contains(&parent)) {
                among.insert(*rank);
                found.extend(self.entries.get(rank).cloned());
            }
        }
        found
    }

    /// Of the one that came as number `at`, from 0; none if it is the root.
    fn parent_of(&self, at: usize) -> Option<Rank> {
        at.checked_sub(FAN_OUT).map(|rest| self.order[rest / FAN_OUT])
    }

    /// The rank right under the root that a rank hangs under, or is.
    pub fn branch_of(&self, rank: Rank) -> Option<Rank> {
        let mut at = *self.places.get(&rank)?;
        while let Some(parent) = self.parent_of(at) {
            at = self.places[&parent];
        }
        Some(self.order[at])
    }

    /// Of those who have not settled.
    pub fn links(&self) -> impl Iterator<Item = LinkId> {
        self.coming.keys().copied()
    }

    pub fn size(&self) -> usize {
        self.roster.len()
    }
}

impl Node {
    pub(super) fn hang_under(&mut self, link: LinkId, entry: Entry, now: u64) {
        self.known.insert(entry.rank, entry.clone());
        self.up = Some(Up {
            link,
            entry,
            vigil: Vigil::new(now),
            pulse: Pulse::default(),
            clock: None,
            hears_root: true,
        });
        self.next_ping_ns = now + self.ping_ns();
    }

    /// At the root: who came, and where to go.
    pub(super) fn on_report(&mut self, now: u64, link: LinkId, entry: Entry) {
        if let Some(down) = self.down.get_mut(&link).filter(|down| down.entry.rank == entry.rank) {
            down.entry = entry.clone();
            return self.note(&entry);
        }
        let Some(root) = &mut self.root else { return };
        let claimed = root.coming.get(&link).map(|(rank, _)| *rank);
        if claimed != Some(entry.rank) || self.verdict.is_some() {
            return;
        }
        root.places.insert(entry.rank, root.order.len());
        root.order.push(entry.rank);
        root.entries.insert(entry.rank, entry.clone());
        root.coming.insert(link, (entry.rank, Some(entry.clone())));
        let parent = root.parent_of(root.order.len() - 1).and_then(|rank| root.entries.get(&rank).cloned());
        self.note(&entry);
        let direct = parent.is_none();
        self.send(link, Say::Welcome { parent });
        if direct {
            self.settle_at_root(now, link, entry);
        }
    }

    /// Remembers where somebody can be reached.
    pub(super) fn note(&mut self, entry: &Entry) {
        // Of ourselves nobody knows more than we do.
        if entry.rank == self.me.rank {
            return;
        }
        self.known.insert(entry.rank, entry.clone());
        self.trouble.note(entry);
    }

    fn settle_at_root(&mut self, now: u64, link: LinkId, entry: Entry) {
        if let Some(root) = &mut self.root {
            root.no_longer_comes(link);
            root.settled.insert(entry.rank);
        }
        self.deputies.push(entry.clone());
        self.add_down(now, link, entry);
        self.send_down(&Say::Deputies(self.deputies.clone()));
        self.settle(now);
    }

    fn add_down(&mut self, now: u64, link: LinkId, entry: Entry) {
        let (ready, waiting, bye) = Default::default();
        self.down.insert(link, Down { entry, vigil: Vigil::new(now), ready, waiting, bye });
    }

    /// Somebody hangs under us from now on. Where it can be reached it says next.
    pub(super) fn take_under(&mut self, now: u64, link: LinkId, rank: Rank) {
        let entry = Entry { rank, ..Entry::unknown() };
        self.add_down(now, link, entry);
        self.send(link, Say::Deputies(self.deputies.clone()));
        if let Some(hosts) = self.all_in {
            self.send(link, Say::AllIn { hosts });
        }
    }

    pub(super) fn on_welcome(&mut self, now: u64, link: LinkId, parent: Option<Entry>) {
        if self.up.as_ref().is_none_or(|up| up.link != link) {
            return;
        }
        let is_odd = parent.as_ref().is_some_and(|parent| parent.rank == self.me.rank);
        if std::mem::replace(&mut self.welcomed, true) || is_odd {
            return self.refuse(
                now,
                link,
                "a welcome that is none: only the root gives one, and once".into(),
            );
        }
        if let Some(parent) = parent {
            let moving = self.dial(&parent, Role::Tree, now + MOVE_NS);
            self.moving = Some((moving, parent));
        }
    }

    /// The dial to the parent has ended.
    pub(super) fn on_moved(&mut self, now: u64, link: LinkId, parent: Entry, result: Result<(), Reach>) {
        match result {
            Ok(()) => {
                self.send_up(Say::Settled);
                self.hang_under(link, parent, now);
                self.send(link, Say::Report(self.me.clone()));
            }
            Err(Reach::Refused) => {
                let how = "is gone: its host says that nobody is there".into();
                self.report(now, Some(parent), Notice::Lost(how));
            }
            Err(reach) => self.report(now, Some(parent), Notice::Silent { silent_ms: MOVE_NS / MS, reach }),
        }
    }

    pub(super) fn on_settled(&mut self, now: u64, link: LinkId) {
        let Some(root) = &mut self.root else { return };
        let Some((rank, Some(_))) = root.no_longer_comes(link) else { return };
        root.settled.insert(rank);
        self.out.push(super::Action::Close(link));
        self.settle(now);
    }

    /// At the root: once all hang where they should, everybody is told.
    pub(super) fn settle(&mut self, now: u64) {
        let Some(root) = &self.root else { return };
        if root.settled.len() < root.roster.len() || self.all_in.is_some() {
            return;
        }
        let hosts: BTreeSet<&String> = root.entries.values().map(|entry| &entry.host).collect();
        let hosts = hosts.len() as u32;
        self.arrived(now, hosts);
    }

    pub(super) fn on_deputies(&mut self, link: LinkId, deputies: Vec<Entry>) {
        if self.up.as_ref().is_some_and(|up| up.link == link) {
            deputies.iter().for_each(|entry| self.note(entry));
            // The root's own word on where it is.
            let root = deputies.first().cloned();
            self.up
                .iter_mut()
                .zip(root)
                .filter(|(up, root)| up.entry.rank == root.rank)
                .for_each(|(up, root)| up.entry = root);
            self.deputies = deputies;
            self.send_down(&Say::Deputies(self.deputies.clone()));
        }
    }

    pub(super) fn on_all_in(&mut self, now: u64, link: LinkId, hosts: u32) {
        if self.up.as_ref().is_some_and(|up| up.link == link) {
            self.arrived(now, hosts);
        }
    }

    fn arrived(&mut self, now: u64, hosts: u32) {
        self.all_in = Some(hosts);
        self.send_down(&Say::AllIn { hosts });
        self.tell(Heard::AllIn(hosts));
        self.send_up(Say::Ping { sent_ns: now });
        self.check_round(now);
    }

    pub(super) fn arrival_due(&self) -> Option<u64> {
        (self.root.is_some() && self.all_in.is_none()).then_some(self.limits.arrive_ns)
    }

    /// At the root: names those who did not come in time.
    pub(super) fn look_at_arrivals(&mut self, now: u64) {
        let Some(root) = self.root.as_ref().filter(|_| self.arrival_due().is_some_and(|due| now >= due))
        else {
            return;
        };
        let missing: BTreeSet<Rank> = root.roster.difference(&root.settled).copied().collect();
        let Some(&first) = missing.first() else { return };
        if let Some(abort) = self.own_absence(now).or_else(|| self.own_lateness(root)) {
            return self.conclude(now, abort, None);
        }
        let (names, waited_s) = (RankNames(&missing), self.limits.arrive_s);
        let mut text = format!("did not arrive: {names} did not within {waited_s:.1} s");
        if let Some((rank, why)) = root.refused.iter().find(|(rank, _)| missing.contains(rank)) {
            text += &format!("; somebody who claimed to be {rank} was turned away: {why}");
        }
        let host = root.entries.get(&first).map_or("an unknown host".into(), |entry| entry.host.clone());
        let abort = match self.sees_no_other_host(root) {
            true => {
                let text = format!(
                    "{names} did not arrive within {waited_s:.1} s, and nobody else of another host did"
                );
                Abort::either((self.me.rank, self.me.host.clone()), (first, host), text)
            }
            false => Abort::new(first, host, text),
        };
        self.conclude(now, abort, None);
    }

    /// Nobody came, and this process was started when the others had given up.
    fn own_lateness(&self, root: &Root) -> Option<Abort> {
        let late_s = self.limits.late_s.filter(|_| root.entries.len() == 1)?;
        let text = format!("came too late: {late_s:.1} s after its job began, when nobody was left");
        Some(Abort::new(self.me.rank, self.me.host.clone(), text))
    }

    /// All of this host are here, and nobody of any other is: it may be our own cable.
    fn sees_no_other_host(&self, root: &Root) -> bool {
        let here = root.entries.values().filter(|entry| entry.host == self.me.host).count();
        let local = self.limits.local_world.is_some_and(|local| local as usize == here);
        local && here == root.entries.len() && here < root.roster.len()
    }

    /// Somebody who claimed to be a rank was turned away.
    pub fn refused(&mut self, rank: Rank, why: Refusal) {
        // Ranks that do not exist are not remembered, however many claim to be one.
        if let Some(root) = self.root.as_mut().filter(|root| root.roster.contains(&rank)) {
            root.refused.insert(rank, why);
        }
    }

    /// Finds out where some ranks can be reached.
    pub(super) fn look_up(&mut self, now: u64, ranks: Vec<Rank>) {
        let missing: Vec<Rank> =
            ranks.iter().copied().filter(|rank| !self.known.contains_key(rank)).collect();
        if missing.is_empty() || self.root.is_some() {
            let entries = ranks.iter().filter_map(|rank| self.known.get(rank).cloned()).collect();
            return self.tell(Heard::Entries(entries));
        }
        self.ask_where(now, ranks, missing);
    }

    pub(super) fn on_where(&mut self, link: LinkId, ranks: &[Rank]) {
        let Some(root) = &self.root else { return };
        let found = ranks.iter().filter_map(|rank| root.entries.get(rank).cloned()).collect();
        self.send(link, Say::Entries(found));
    }
}
