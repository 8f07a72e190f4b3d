//! Who says nothing on its own link. It is asked over a fresh connection, and in good time: when it has been silent for as
//! long as it may, it is known what came of that.
//!
//! ```text
//! last word ───────── asked ─────────── silent for too long
//!                     half of that      no answer: reported, with how it could not be reached
//!                                       an answer: busy, and asked again later
//! ```

use super::{Heard, LinkId, MS, Node};
use crate::rendezvous::message::{Notice, Reach};
use crate::rendezvous::{Abort, Entry};
use std::sync::atomic::Ordering;

/// How often somebody may be silent and answer a question all the same, before it is reported.
const MAX_CHECKS: u32 = 6;

/// What is known of a neighbour's silence.
#[derive(Debug)]
pub(super) struct Vigil {
    pub heard_ns: u64,
    /// How often it was silent and then answered all the same.
    checks: u32,
    /// When it was asked, where that is open.
    asked_ns: Option<u64>,
    /// It did not answer, and how.
    missed: Option<Reach>,
    /// It was reported, and is no help.
    pub given_up: bool,
}

/// What a look at a neighbour's silence leads to.
enum Next {
    Ask,
    GiveUp(Reach),
}

impl Vigil {
    pub fn new(now: u64) -> Self {
        Self { heard_ns: now, checks: 0, asked_ns: None, missed: None, given_up: false }
    }

    /// It said something.
    pub fn heard(&mut self, now: u64) {
        (self.heard_ns, self.checks, self.missed) = (now, 0, None);
    }

    /// Time that passed without us is nobody's silence.
    pub fn shift(&mut self, away: u64, now: u64) {
        self.heard_ns = (self.heard_ns + away).min(now);
    }

    /// When there is something to do, if nothing is heard until then.
    fn due_ns(&self, limits: (u64, u64)) -> Option<u64> {
        let (ask_after, silence) = limits;
        match (self.given_up, self.asked_ns, self.missed) {
            (true, ..) | (_, Some(_), _) => None,
            (.., Some(_)) => Some(self.heard_ns + silence),
            (.., None) => Some(self.heard_ns + ask_after),
        }
    }

    fn next(&mut self, now: u64, limits: (u64, u64)) -> Option<Next> {
        self.due_ns(limits).filter(|due| now > *due)?;
        match self.missed {
            Some(reach) => {
                self.given_up = true;
                Some(Next::GiveUp(reach))
            }
            None => {
                self.asked_ns = Some(now);
                Some(Next::Ask)
            }
        }
    }

    /// What came of the question.
    fn checked(&mut self, now: u64, reach: Reach) {
        let asked_ns = self.asked_ns.take().unwrap_or(now);
        // It may have spoken meanwhile.
        if self.heard_ns > asked_ns {
            return;
        }
        self.checks += 1;
        if reach == Reach::Answers && self.checks <= MAX_CHECKS {
            self.heard_ns = now;
        } else {
            self.missed = Some(reach);
        }
    }
}

impl Node {
    /// After which silence a neighbour is asked, and after which it is reported.
    fn silence_limits(&self) -> (u64, u64) {
        let silence = self.limits.silence_ns;
        ((silence / 2).max(silence.saturating_sub(2 * self.probe_ns())), silence)
    }

    fn vigil(&mut self, link: LinkId) -> Option<&mut Vigil> {
        match self.up.as_mut().filter(|up| up.link == link) {
            Some(up) => Some(&mut up.vigil),
            None => self.down.get_mut(&link).map(|down| &mut down.vigil),
        }
    }

    pub(super) fn note_heard(&mut self, now: u64, link: LinkId) {
        self.vigil(link).into_iter().for_each(|vigil| vigil.heard(now));
    }

    pub(super) fn silence_due(&self) -> Option<u64> {
        let down = self.down.values().filter(|down| !down.bye).map(|down| &down.vigil);
        let all = self.up.iter().map(|up| &up.vigil).chain(down);
        // A moment is over the nanosecond after it.
        all.filter_map(|vigil| vigil.due_ns(self.silence_limits())).min().map(|due| due + 1)
    }

    /// Asks whoever has said nothing for long whether it is there; a busy machine is no dead one.
    pub(super) fn look_for_silence(&mut self, now: u64) {
        let limits = self.silence_limits();
        let up = self.up.iter_mut().map(|up| (up.link, &up.entry, &mut up.vigil));
        let down = self.down.iter_mut().filter(|(_, down)| !down.bye);
        let all = up.chain(down.map(|(link, down)| (*link, &down.entry, &mut down.vigil)));
        let due: Vec<(LinkId, Entry, Next)> = all
            .filter_map(|(link, entry, vigil)| Some((link, entry.clone(), vigil.next(now, limits)?)))
            .collect();
        for (link, entry, next) in due {
            match next {
                Next::Ask => self.check(now, link, &entry),
                Next::GiveUp(reach) => self.give_up(now, link, entry, reach),
            }
        }
    }

    /// What came of a question to one that is silent.
    pub(super) fn checked(&mut self, now: u64, link: LinkId, reach: Reach) {
        self.vigil(link).into_iter().for_each(|vigil| vigil.checked(now, reach));
        self.look_for_silence(now);
    }

    fn give_up(&mut self, now: u64, link: LinkId, entry: Entry, reach: Reach) {
        let silent_ms = self.vigil(link).map_or(0, |vigil| now.saturating_sub(vigil.heard_ns) / MS);
        if self.up.as_ref().is_some_and(|up| up.link == link) {
            self.lose_the_root();
        }
        let why = format!("it does not answer, and was not heard for {silent_ms} ms");
        self.tell(Heard::Suspect(entry.rank, why));
        self.report(now, Some(entry), Notice::Silent { silent_ms, reach });
    }

    /// If we were away for longer than anybody may be, whatever comes to light now is our own doing.
    pub(super) fn own_absence(&self, now: u64) -> Option<Abort> {
        // The others ask once more before they give somebody up.
        let too_long = self.limits.silence_ns + self.probe_ns();
        let continued = self.continued_ns.load(Ordering::SeqCst);
        let away = self.absence.stopped_ns(now, continued).filter(|away| *away >= too_long)?;
        let (away_s, allowed_s) = (away as f64 / 1e9, self.limits.silence_ns as f64 / 1e9);
        let text = format!("was stopped for {away_s:.1} s, longer than the {allowed_s:.1} s allowed");
        Some(Abort::new(self.me.rank, self.me.host.clone(), text))
    }
}
