//! `crossmesh explain --flight`: who was at fault, who waited for whom, and what the simulator would have seen by then.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crossmesh_core::units::{Bytes, Seconds};

use crate::output::{Table, and_more, count};
use crate::replay::{RankReplay, Replay, of_tensor};

/// More ops than this are counted, not shown.
const SHOWN: usize = 20;

pub fn render(replay: &Replay) -> String {
    let mut text = format!("flight of {}\n", replay.what);
    text += &verdict(replay);
    text += &ranks(replay);
    text += &chains(replay);
    text += &ops(replay);
    text += &last_line(replay);
    text
}

fn verdict(replay: &Replay) -> String {
    let clocks = match replay.clock_error_s {
        None => "; nobody compared the ranks' clocks".to_string(),
        Some(0.0) => String::new(),
        Some(error) => format!("; the ranks' clocks agree to {}", Seconds(error)),
    };
    match &replay.verdict {
        None => format!("  ended well after {}{clocks}\n", Seconds(replay.ended_s)),
        Some(abort) => format!(
            "  {abort}\n  given up {} into run {}; the last byte moved at {}{clocks}\n",
            Seconds(replay.ended_s),
            replay.run,
            Seconds(replay.moved_s),
        ),
    }
}

fn ranks(replay: &Replay) -> String {
    let mut table = Table::new("lllrrl");
    table.row(["rank", "host", "process", "ops done", "predicted", "then"]);
    for rank in &replay.ranks {
        let ended = rank.ended.clone().unwrap_or_else(|| "?".into());
        let done = match rank.recorded {
            true => format!("{} of {}", rank.done, rank.ops),
            false => format!("? of {}", rank.ops),
        };
        let name = format!("{}r{}", if rank.culprit { ">> " } else { "   " }, rank.rank);
        table.row([name, rank.host.clone(), ended, done, rank.predicted_done.to_string(), doing(rank)]);
    }
    format!("what everybody did, and how many ops were predicted to have ended by then\n{}", table.render(2))
}

fn doing(rank: &RankReplay) -> String {
    match (&rank.waits_for, &rank.waits_at) {
        (Some(peer), Some(at)) => format!("waits for r{peer}: {at}"),
        _ if !rank.recorded => "left no record".into(),
        _ if rank.ops == 0 => "nothing to do".into(),
        _ if rank.done == rank.ops => "done".into(),
        _ => "waits for nobody".into(),
    }
}

/// Who waits for whom, from those that nobody waits for to the end.
fn chains(replay: &Replay) -> String {
    let waits: BTreeMap<u32, u32> =
        replay.ranks.iter().filter_map(|r| Some((r.rank, r.waits_for?))).collect();
    let starts = waits.keys().filter(|rank| !waits.values().any(|peer| peer == *rank));
    let mut text = String::new();
    for start in starts.take(SHOWN) {
        let (mut at, mut chain) = (*start, vec![*start]);
        while let Some(next) = waits.get(&at).filter(|next| !chain.contains(next)) {
            at = *next;
            chain.push(at);
        }
        let names: Vec<String> = chain.iter().map(|rank| format!("r{rank}")).collect();
        let culprit = replay.ranks.iter().any(|r| r.rank == at && r.culprit);
        let _ = writeln!(text, "  {}{}", names.join(" -> "), if culprit { "   the culprit" } else { "" });
    }
    if text.is_empty() { text } else { format!("who waited for whom\n{text}") }
}

/// What was predicted and had not happened.
fn ops(replay: &Replay) -> String {
    if replay.ops.is_empty() {
        return String::new();
    }
    let mut table = Table::new("lllrrrl");
    table.row(["", "op", "predicted", "by then", "happened", "of", ""]);
    for op in replay.ops.iter().take(SHOWN) {
        let predicted = format!("{} to {}", Seconds(op.predicted_start_s), Seconds(op.predicted_end_s));
        let notes: Vec<&str> = [(op.stuck, "stuck"), (op.late, "late"), (!op.late && op.held_up, "held up")]
            .iter()
            .filter_map(|(so, note)| so.then_some(*note))
            .collect();
        table.row([
            if op.stuck { ">>" } else { "" }.to_string(),
            format!("r{} {}{}", op.rank, op.what, of_tensor(&op.tensor)),
            predicted,
            Bytes(op.predicted_moved).to_string(),
            Bytes(op.moved).to_string(),
            Bytes(op.bytes).to_string(),
            notes.join(", "),
        ]);
    }
    let title = format!("replay: what was to happen by {}, and had not", Seconds(replay.moved_s));
    format!("{title}\n{}{}", table.render(2), and_more(replay.ops.len(), SHOWN, "op"))
}

fn last_line(replay: &Replay) -> String {
    let Some(abort) = &replay.verdict else {
        return format!(
            "everything ended: {}, predicted {}\n",
            Seconds(replay.ended_s),
            Seconds(replay.predicted_s)
        );
    };
    let under_way = match replay.under_way {
        0 => "nothing else was".to_string(),
        1 => "1 other was under way".to_string(),
        more => format!("{more} others were under way"),
    };
    format!("{} unfinished because of {}; {under_way}\n", count(replay.held_up, "op"), abort.culprit)
}
