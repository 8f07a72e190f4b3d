//! What the ranks of a run say about how it failed, told once and not once a rank.
//!
//! ```text
//! r0 ── abort: r3 on h1 was lost ──┐
//! r1 ── abort: r3 on h1 was lost ──┼──▶ error: r3 on h1 was lost            what most of them agree on
//! r2 ── error: no room on its GPU ─┘    [2] error: no room on its GPU       above it, whatever differs
//! ```

use std::collections::BTreeMap;

use crossmesh_comm::rendezvous::Abort;
use crossmesh_core::id::Rank;
use crossmesh_core::printable::printable;

/// What starts an error of ours on stderr.
const ERROR: &str = "error: ";

/// See the module.
#[derive(Debug, Default)]
pub struct Verdicts {
    /// Why the job ended, in the words of those who ended in time to say so.
    aborts: BTreeMap<Rank, Abort>,
    /// An error on a rank's stderr with all lines that follow it: hints, pointers.
    complaints: BTreeMap<Rank, Vec<String>>,
}

impl Verdicts {
    /// A rank was told why the job ended.
    pub fn told(&mut self, rank: Rank, abort: Abort) {
        self.aborts.insert(rank, abort);
    }

    /// Keeps a line that belongs to an error, and says whether it does.
    pub fn complains(&mut self, rank: Rank, line: &str) -> bool {
        let belongs = line.starts_with(ERROR) || self.complaints.contains_key(&rank);
        if belongs {
            self.complaints.entry(rank).or_default().push(line.to_string());
        }
        belongs
    }

    /// What a rank was told.
    pub fn of(&self, rank: Rank) -> Option<&Abort> {
        self.aborts.get(&rank)
    }

    /// What most ranks agree on: first the host, then the rank there, then the words. Ranks of a host that was cut off hear
    /// nothing of the others, and are few.
    pub fn agreed(&self) -> Option<&Abort> {
        let ways: [&dyn Fn(&Abort) -> String; 3] =
            [&|a| a.host.clone(), &|a| a.culprit.to_string(), &|a| a.text.clone()];
        let mut among: Vec<&Abort> = self.aborts.values().collect();
        for of in ways {
            let winner = most(among.iter().map(|abort| of(abort)))?;
            among.retain(|abort| of(abort) == winner);
        }
        among.first().copied()
    }

    /// Why the run failed: what was agreed on or, where it failed before there was anybody to agree with, what most
    /// complained of.
    pub fn reason(&self) -> Option<String> {
        self.agreed().map(Abort::to_string).or_else(|| {
            let text = most(self.complaints.values().map(|lines| lines.join("\n")))?;
            text.strip_prefix(ERROR).map(String::from)
        })
    }

    /// What ranks say beside the reason that is told anyway: each once, behind those who say it.
    pub fn beside(&self, reason: Option<&str>) -> Vec<String> {
        let reason = reason.map(|reason| format!("{ERROR}{reason}"));
        let agreed = self.agreed();
        let aborts =
            self.aborts.iter().filter(|(_, abort)| agreed.is_none_or(|a| a.culprit != abort.culprit));
        let aborts = aborts.map(|(rank, abort)| (*rank, format!("{ERROR}{abort}")));
        // A rank says what it was told on stderr too, for whoever started it by hand.
        let told = |rank: &Rank| self.aborts.get(rank).map(|abort| format!("{ERROR}{abort}"));
        let complaints = self.complaints.iter().map(|(rank, lines)| (*rank, lines.join("\n")));
        let complaints = complaints.filter(|(rank, text)| told(rank).as_ref() != Some(text));
        let mut by_text: BTreeMap<String, Vec<Rank>> = BTreeMap::new();
        for (rank, text) in aborts.chain(complaints) {
            if Some(&text) != reason.as_ref() {
                by_text.entry(text).or_default().push(rank);
            }
        }
        by_text.iter().map(|(text, ranks)| format!("[{}] {}", spans(ranks), printable(text))).collect()
    }
}

/// What there is most of; of as many, the last in order.
fn most(texts: impl Iterator<Item = String>) -> Option<String> {
    let mut votes: BTreeMap<String, usize> = BTreeMap::new();
    texts.for_each(|text| *votes.entry(text).or_default() += 1);
    votes.into_iter().max_by_key(|(_, votes)| *votes).map(|(text, _)| text)
}

/// `0,2-5`.
fn spans(ranks: &[Rank]) -> String {
    let mut spans: Vec<(u32, u32)> = vec![];
    for rank in ranks {
        match spans.last_mut() {
            Some((_, last)) if *last + 1 == rank.0 => *last = rank.0,
            _ => spans.push((rank.0, rank.0)),
        }
    }
    let name = |(first, last): &(u32, u32)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    };
    spans.iter().map(name).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn others(verdicts: &Verdicts) -> Vec<String> {
        verdicts.beside(verdicts.reason().as_deref())
    }

    fn abort(culprit: u32, text: &str) -> Abort {
        Abort::new(Rank(culprit), format!("h{culprit}"), text)
    }

    #[test]
    fn what_all_say_is_said_once() {
        let mut verdicts = Verdicts::default();
        for rank in (0..7).map(Rank) {
            verdicts.told(rank, abort(7, "was killed"));
            verdicts.complains(rank, "error: r7 on h7 was killed");
        }
        assert_eq!(verdicts.reason().unwrap(), "r7 on h7 was killed");
        assert_eq!(others(&verdicts), Vec::<String>::new());
    }

    #[test]
    fn who_says_otherwise_is_heard_once_too() {
        let mut verdicts = Verdicts::default();
        (0..5).for_each(|rank| verdicts.told(Rank(rank), abort(7, "is silent")));
        // The same culprit in other words is the same verdict.
        verdicts.told(Rank(5), abort(7, "is silent, and owes 3 B"));
        (6..8).for_each(|rank| verdicts.told(Rank(rank), abort(0, "is silent")));
        assert_eq!(verdicts.reason().unwrap(), "r7 on h7 is silent");
        assert_eq!(others(&verdicts), ["[6-7] error: r0 on h0 is silent"]);
    }

    #[test]
    fn an_error_keeps_its_hint_and_whatever_else_is_printed_is_none() {
        let mut verdicts = Verdicts::default();
        assert!(!verdicts.complains(Rank(0), "r0: turned away 10.0.0.1"));
        for rank in [0, 1, 2, 4] {
            assert!(verdicts.complains(Rank(rank), "error: no plan.json"));
            assert!(verdicts.complains(Rank(rank), "hint: is the disk full?"));
        }
        assert!(verdicts.complains(Rank(3), "error: out of memory"));
        assert_eq!(verdicts.reason().unwrap(), "no plan.json\nhint: is the disk full?");
        assert_eq!(others(&verdicts), ["[3] error: out of memory"]);
        // An abort says more, and the complaints are told beside it.
        verdicts.told(Rank(5), abort(3, "is gone"));
        assert_eq!(verdicts.reason().unwrap(), "r3 on h3 is gone");
        assert_eq!(
            others(&verdicts),
            ["[0-2,4] error: no plan.json\nhint: is the disk full?", "[3] error: out of memory"]
        );
    }

    #[test]
    fn nothing_said_is_no_reason() {
        let silent = Verdicts::default();
        assert_eq!((silent.reason(), others(&silent)), (None, vec![]));
    }

    #[test]
    fn where_all_went_well_no_complaint_is_lost() {
        let mut verdicts = Verdicts::default();
        verdicts.complains(Rank(1), "error: cannot write the record");
        assert_eq!(verdicts.beside(None), ["[1] error: cannot write the record"]);
    }
}
