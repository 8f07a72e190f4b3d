//! The groups of a rank, and the numbers that tell their calls apart.
//!
//! A call is a job of the engine, and a job's id has to be the same on all ranks that take part and on none of them in
//! use for anything else. Ranks are in different groups and make their calls in different orders, so the id is made of
//! the group's number and the call's place among the group's calls:
//!
//! ```text
//!  31   30 ........ 20   19 .......... 0
//!   0   the group (1 ..)  the call         0 is left to other programs
//!   1   what a group agrees on its number by: a hash of its ranks
//! ```
//!
//! The number itself is agreed upon when the group is made: the largest that is next for one of its members. So no
//! rank has it in use, and ranks that are in no common group need not know of each other's.

use crossmesh_core::collective::{Call, Collective, Group};
use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_core::layout::ReduceOp;
use rustc_hash::FxHashMap;

use super::{CallError, Collectives, Reduction};

const CALL_BITS: u32 = 20;
const MAX_GROUPS: u32 = 1 << (31 - CALL_BITS);
/// Jobs of a smaller id belong to nobody here.
pub const FIRST_JOB: u32 = 1 << CALL_BITS;

/// A group of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupId(pub(super) u32);

#[derive(Debug)]
pub(super) struct Team {
    pub group: Group,
    number: u32,
    calls: u32,
}

#[derive(Debug, Default)]
pub(super) struct Groups {
    teams: Vec<Team>,
    /// How often a group of these very ranks was made.
    made: FxHashMap<Vec<Rank>, u32>,
    largest: u32,
    world: Option<GroupId>,
}

impl Groups {
    pub fn get(&self, id: GroupId) -> Result<&Team, CallError> {
        self.teams.get(id.0 as usize).ok_or(CallError::NoSuchGroup(id))
    }

    /// The id of a group's next call.
    pub fn next_job(&mut self, id: GroupId) -> Result<u32, CallError> {
        let team = self.teams.get_mut(id.0 as usize).ok_or(CallError::NoSuchGroup(id))?;
        let call = team.calls % (1 << CALL_BITS);
        team.calls = team.calls.wrapping_add(1);
        Ok(team.number << CALL_BITS | call)
    }

    fn add(&mut self, group: Group, number: u32) -> GroupId {
        self.largest = number;
        self.teams.push(Team { group, number, calls: 0 });
        GroupId(self.teams.len() as u32 - 1)
    }
}

impl Collectives {
    /// Makes a group. All its members do so, with the same ranks in the same order; nobody else has to. Ranks that make
    /// several groups together make them in one order.
    pub fn group(&mut self, ranks: &[Rank]) -> Result<GroupId, CallError> {
        let group = Group::new(ranks.to_vec())?;
        if group.position(self.me).is_none() {
            return Err(CallError::NotAMember { me: self.me, ranks: ranks.to_vec() });
        }
        let number = self.agree_on_number(&group)?;
        if number >= MAX_GROUPS {
            return Err(CallError::TooManyGroups { me: self.me, count: number });
        }
        Ok(self.groups.add(group, number))
    }

    /// The group of all ranks of the cluster; made the first time.
    pub fn world(&mut self) -> Result<GroupId, CallError> {
        if let Some(world) = self.groups.world {
            return Ok(world);
        }
        let all: Vec<Rank> = (0..self.cluster.num_devices()).map(Rank::at).collect();
        let world = self.group(&all)?;
        self.groups.world = Some(world);
        Ok(world)
    }

    /// The ranks of a group, in its order.
    pub fn ranks_of(&self, group: GroupId) -> Result<&[Rank], CallError> {
        Ok(self.groups.get(group)?.group.ranks())
    }

    fn agree_on_number(&mut self, group: &Group) -> Result<u32, CallError> {
        let ranks = group.ranks();
        let times = self.groups.made.entry(ranks.to_vec()).or_default();
        *times += 1;
        let hash = hash_of(ranks, *times);
        let next = self.groups.largest + 1;
        if ranks.len() == 1 {
            return Ok(next);
        }
        let call = Call::new(Collective::AllReduce, group, DType::I64, 3).with_op(ReduceOp::Max);
        let fingerprint = (hash >> 1) as i64;
        let said = self.buffer_of(&[i64::from(next), fingerprint, -fingerprint])?;
        let job = 1 << 31 | hash as u32 >> 1;
        let pending = self.start_job(job, call, said, Reduction::Max)?;
        let agreed = self.wait(pending)?;
        match (agreed[1] == fingerprint && agreed[2] == -fingerprint, u32::try_from(agreed[0])) {
            (true, Ok(number)) => Ok(number),
            _ => Err(CallError::GroupsDiffer { me: self.me, ranks: ranks.to_vec() }),
        }
    }
}

/// FNV-1a over the ranks, and how often they have met.
fn hash_of(ranks: &[Rank], times: u32) -> u64 {
    let numbers = ranks.iter().map(|r| r.0).chain([times]);
    numbers
        .flat_map(u32::to_le_bytes)
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}
