//! A number that differs where plans do, and is the same on every machine, in every process and by every build: BLAKE3 over what the plan says, written
//! out here. (`Hash` writes what the machine has: its byte order, its word size, what the standard library thinks of strings.)

use std::fmt::Display;

use crossmesh_core::reshard::{Placed, Plan, Reshard, Transfer};

/// So much is put together before it is hashed: BLAKE3 likes long runs.
const GATHER_BYTES: usize = 64 << 10;

pub fn fingerprint(plan: &Plan) -> i64 {
    let mut text = Text { hasher: blake3::Hasher::new(), gathered: Vec::with_capacity(GATHER_BYTES) };
    for Reshard { name, src, dst, .. } in &plan.problem.reshards {
        text.words(name);
        [src, dst].into_iter().for_each(|side| text.placed(side));
    }
    for transfer in plan.transfers() {
        text.transfer(plan, transfer);
    }
    text.end()
}

struct Text {
    hasher: blake3::Hasher,
    gathered: Vec<u8>,
}

impl Text {
    fn number(&mut self, number: u64) {
        if self.gathered.len() + 8 > GATHER_BYTES {
            self.flush();
        }
        self.gathered.extend_from_slice(&number.to_le_bytes());
    }

    /// With their length before them, so that what follows cannot be taken for a part of them.
    fn words(&mut self, words: &impl Display) {
        let words = words.to_string();
        self.number(words.len() as u64);
        self.gathered.extend_from_slice(words.as_bytes());
    }

    fn placed(&mut self, placed: &Placed) {
        self.words(&placed.layout);
        self.number(placed.ranks.len() as u64);
        placed.ranks.iter().for_each(|rank| self.number(rank.0.into()));
    }

    fn transfer(&mut self, plan: &Plan, transfer: &Transfer) {
        let Transfer { tensor, src, dst, lane, bytes, reduce, then_own, .. } = *transfer;
        let flags = u64::from(reduce) | u64::from(then_own) << 1;
        for number in [tensor.into(), src.0.into(), dst.0.into(), lane.into(), bytes, flags] {
            self.number(number);
        }
        let (spans, after) = (plan.region(transfer).spans(), plan.after(transfer));
        self.number(spans.len() as u64);
        spans.iter().for_each(|span| [span.start, span.end].into_iter().for_each(|n| self.number(n)));
        self.number(after.len() as u64);
        after.iter().for_each(|other| self.number(other.0.into()));
    }

    fn flush(&mut self) {
        self.hasher.update(&self.gathered);
        self.gathered.clear();
    }

    fn end(mut self) -> i64 {
        self.flush();
        let mut word = [0; 8];
        word.copy_from_slice(&self.hasher.finalize().as_bytes()[..8]);
        i64::from_le_bytes(word)
    }
}
