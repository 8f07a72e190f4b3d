//! A rank's ops as they are made, each with what it waits for.

use crate::id::RegionId;
use crate::program::{Dep, DepKind, Op, OpKind, RankProgram};

#[derive(Default)]
pub(super) struct RankOps {
    pub ops: Vec<Op>,
    pub deps: Vec<Vec<Dep>>,
    pub stages: Vec<u64>,
    /// Its last compute op.
    pub computed: Option<u32>,
    /// The ops that come before the next, where communication blocks.
    pub before: Vec<u32>,
}

impl RankOps {
    pub fn push(&mut self, kind: OpKind, tensor: u32, region: RegionId, bytes: u64, deps: Vec<Dep>) -> u32 {
        self.ops.push(Op { kind, tensor, region, bytes, deps: 0..0 });
        self.deps.push(deps);
        self.ops.len() as u32 - 1
    }

    pub fn finish(self) -> RankProgram {
        let mut program = RankProgram { ops: self.ops, deps: vec![], stages: self.stages };
        for (op, mut deps) in program.ops.iter_mut().zip(self.deps) {
            deps.sort_unstable_by_key(|d| (d.op, d.kind == DepKind::Done));
            deps.dedup();
            let start = program.deps.len() as u32;
            program.deps.extend(deps);
            op.deps = start..program.deps.len() as u32;
        }
        program
    }
}

/// Waits for an op's end.
pub(super) fn done(op: u32) -> Dep {
    Dep { op, kind: DepKind::Done }
}
