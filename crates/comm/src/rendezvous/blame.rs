//! Who is at fault? Ranks report whom they waited for in vain; the culprit is at the end of that chain.
//!
//! ```text
//! r0 waits for r1, r1 waits for r4, r4 says nothing        the culprit is r4
//! ```
//!
//! A rank whose connection closed without a word is dead, and goes before everything else.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crossmesh_core::id::Rank;
use serde::{Deserialize, Serialize};

/// What a rank has to say about a run that failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The rank it waited for, where it waited.
    pub blames: Option<Rank>,
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

/// Everything known when the lobby decides.
#[derive(Debug, Default)]
pub struct Evidence {
    /// Ranks whose connection closed without a word.
    pub lost: BTreeSet<Rank>,
    /// Ranks that are there, and say nothing while the others report.
    pub silent: BTreeSet<Rank>,
    pub faults: BTreeMap<Rank, Fault>,
}

impl Evidence {
    pub fn is_empty(&self) -> bool {
        self.lost.is_empty() && self.faults.is_empty()
    }

    /// The culprit, and what is said about it. None where nothing went wrong.
    pub fn judge(&self) -> Option<(Rank, String)> {
        if let Some(&lost) = self.lost.first() {
            let seen = self.witness(lost).map_or(String::new(), |text| format!("; {text}"));
            return Some((lost, format!("is gone: its process died or its host was cut off{seen}")));
        }
        let end = self.end_of_chain()?;
        // Somebody who reports is alive; who is blamed and does not report is not.
        let blamed = |rank: &&Rank| self.faults.values().any(|fault| fault.blames == Some(**rank));
        let culprit = match self.silent.contains(&end) {
            true => end,
            false => *self.silent.iter().find(blamed).or(self.silent.first()).unwrap_or(&end),
        };
        match self.faults.get(&culprit) {
            Some(fault) => Some((culprit, format!("failed: {}", fault.text))),
            None => {
                let seen = self.witness(culprit).or_else(|| self.witness(end)).unwrap_or_default();
                Some((culprit, format!("does not answer; {seen}")))
            }
        }
    }

    /// Whom the one waits for that the first waits for, and so on.
    fn end_of_chain(&self) -> Option<Rank> {
        let own = self.faults.iter().find(|(_, fault)| fault.blames.is_none());
        let mut end = *own.or(self.faults.first_key_value())?.0;
        let mut seen = BTreeSet::from([end]);
        while let Some(next) = self.faults.get(&end).and_then(|fault| fault.blames) {
            end = next;
            if !seen.insert(next) {
                break;
            }
        }
        Some(end)
    }

    /// What somebody else says about a rank.
    fn witness(&self, culprit: Rank) -> Option<String> {
        let (_, fault) =
            self.faults.iter().find(|(rank, fault)| fault.blames == Some(culprit) && **rank != culprit)?;
        Some(fault.text.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(lost: &[u32], faults: &[(u32, Option<u32>)]) -> Evidence {
        let fault = |blames: Option<u32>| Fault { blames: blames.map(Rank), text: "recv w, 8 B left".into() };
        Evidence {
            silent: BTreeSet::new(),
            lost: lost.iter().map(|r| Rank(*r)).collect(),
            faults: faults.iter().map(|(r, blames)| (Rank(*r), fault(*blames))).collect(),
        }
    }

    fn culprit(lost: &[u32], faults: &[(u32, Option<u32>)]) -> Option<u32> {
        evidence(lost, faults).judge().map(|(rank, _)| rank.0)
    }

    #[test]
    fn the_end_of_the_chain_is_at_fault() {
        assert_eq!(culprit(&[], &[(0, Some(1)), (1, Some(4)), (7, Some(0))]), Some(4));
        assert_eq!(culprit(&[], &[(3, None), (0, Some(3))]), Some(3));
        assert_eq!(culprit(&[], &[]), None);
    }

    #[test]
    fn the_dead_go_first() {
        assert_eq!(culprit(&[2], &[(0, Some(1)), (1, Some(2))]), Some(2));
        let text = evidence(&[2], &[(1, Some(2))]).judge().unwrap().1;
        assert_eq!(text, "is gone: its process died or its host was cut off; recv w, 8 B left");
    }

    #[test]
    fn the_silent_are_suspect() {
        // r2 forwards for r3, which was stopped: r1 blames r2, and r2 only hears that it is blamed.
        let mut evidence = evidence(&[], &[(1, Some(2)), (2, Some(2)), (0, Some(2))]);
        assert_eq!(evidence.judge().unwrap().0, Rank(2));
        evidence.silent = BTreeSet::from([Rank(3)]);
        assert_eq!(evidence.judge().unwrap().0, Rank(3));
    }

    #[test]
    fn a_circle_ends() {
        assert!(culprit(&[], &[(0, Some(1)), (1, Some(0))]).is_some());
    }
}
