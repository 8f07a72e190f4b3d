//! A rank's ops as they are made, each with what it waits for.

use crate::id::RegionId;
use crate::program::{Dep, DepKind, Moved, OpKind, RankProgram, TileId};

#[derive(Default)]
pub(super) struct RankOps {
    /// Its buffers and tiles, and later its ops.
    pub program: RankProgram,
    ops: Vec<(OpKind, Moved)>,
    pub deps: Vec<Vec<Dep>>,
    /// The tiles that compute ops read, and those they write: by op.
    pub needs: Vec<(u32, TileId)>,
    pub makes: Vec<(u32, TileId)>,
    /// Its last compute op.
    pub computed: Option<u32>,
    /// The ops that come before the next, where communication blocks.
    pub before: Vec<u32>,
}

impl RankOps {
    pub fn len(&self) -> u32 {
        self.ops.len() as u32
    }

    pub fn kind(&self, op: u32) -> &OpKind {
        &self.ops[op as usize].0
    }

    pub fn push(&mut self, kind: OpKind, tensor: u32, region: RegionId, bytes: u64, deps: Vec<Dep>) -> u32 {
        self.ops.push((kind, Moved { tensor, region, bytes }));
        self.deps.push(deps);
        self.len() - 1
    }

    /// `no_tensor` stands in for the number that ops of no tensor have until it is known.
    pub fn finish(mut self, no_tensor: u32) -> RankProgram {
        self.needs.sort_unstable();
        self.needs.dedup();
        self.makes.sort_unstable();
        let (mut needs, mut makes) = (self.needs.into_iter().peekable(), self.makes.into_iter().peekable());
        let mut program = self.program;
        for (i, ((mut kind, mut moved), mut deps)) in (0..).zip(self.ops.into_iter().zip(self.deps)) {
            deps.sort_unstable_by_key(|d| (d.op, d.kind == DepKind::Done));
            deps.dedup();
            if moved.tensor == super::OF_NO_TENSOR {
                moved.tensor = no_tensor;
            }
            if let OpKind::Compute { needs: read, makes: written, .. } = &mut kind {
                let mut next = |list: &mut dyn FnMut() -> Option<(u32, TileId)>| {
                    program.touch(std::iter::from_fn(|| list().map(|(_, tile)| tile)))
                };
                *read = next(&mut || needs.next_if(|(op, _)| *op == i));
                *written = next(&mut || makes.next_if(|(op, _)| *op == i));
            }
            program.push(kind, moved, &deps);
        }
        program
    }
}

/// Waits for an op's end.
pub(super) fn done(op: u32) -> Dep {
    Dep::done(op)
}
