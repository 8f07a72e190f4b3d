//! From what one rank saw to what the job is told, and back.

use crossmesh_core::id::Rank;

use crate::error::CommError;
use crate::rendezvous::{Abort, Fault, RendezvousError};

pub fn comm_error(me: Rank, error: RendezvousError) -> CommError {
    match error {
        RendezvousError::Aborted(Abort { culprit, host, text, .. }) => {
            CommError::Interrupted { me, culprit, host, reason: text }
        }
        other => CommError::System { me, what: "wait for the others", cause: other.to_string() },
    }
}

/// What to report: of an abort, the reason of the one who found out first.
pub fn fault(error: &CommError) -> Fault {
    let (hearsay, text) = match error {
        CommError::Aborted { reason, .. } | CommError::Interrupted { reason, .. } => (true, reason.clone()),
        other => (false, other.to_string()),
    };
    Fault { blames: error.culprit(), hearsay, text: said(&text) }
}

/// The first line of an error, which says what happened, and what may help.
fn said(text: &str) -> String {
    let lines = text.lines().enumerate().filter(|(i, line)| *i == 0 || line.starts_with("hint: "));
    lines.map(|(_, line)| line).collect::<Vec<_>>().join("\n")
}

/// What to report where somebody could not be connected with.
pub fn unconnected(me: Rank, error: RendezvousError) -> Fault {
    let text = said(&error.to_string());
    let blames = match &error {
        RendezvousError::CannotReachPeer { peer, .. } | RendezvousError::BadLink { peer, .. } => Some(*peer),
        RendezvousError::PeersMissing { missing, .. } => missing.first().copied(),
        _ => return fault(&comm_error(me, error)),
    };
    Fault { blames, hearsay: false, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_goes_with_its_hints_and_nothing_else() {
        let cause = "no room\n  in a picture\nhint: make some\nhint: or write elsewhere".into();
        let error = CommError::System { me: Rank(1), what: "save", cause };
        assert_eq!(fault(&error).text, "r1 cannot save: no room\nhint: make some\nhint: or write elsewhere");
    }
}
