//! A rank of MPI's world runs its part of a plan, and learns what the others saw.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Duration;

use crossmesh_comm::deadline::Deadline;
use crossmesh_comm::error::CommError;
use crossmesh_comm::lab::execute::{ExecuteOptions, Failure, Gate, RankReport, execute, peers_of};
use crossmesh_comm::rendezvous::Meeting;
use crossmesh_comm::transport::mpi::OverMpi;
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::Plan;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::verify::Verified;

use super::side_by_side::{plans, run_rank};

static MEETING: Mutex<Option<OverMpi>> = Mutex::new(None);

pub fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

pub fn meet() -> u32 {
    let meeting = OverMpi::meet(soon()).unwrap();
    let world = meeting.world();
    *MEETING.lock().unwrap() = Some(meeting);
    world
}

pub fn leave() {
    Box::new(MEETING.lock().unwrap().take().unwrap()).leave();
}

/// As with threads, but that one of them is this process. A rank that fails ends all.
pub fn run_all(plan: &Plan, options: &ExecuteOptions) -> BTreeMap<Rank, Result<RankReport, Failure>> {
    let mut meeting = MEETING.lock().unwrap();
    let meeting = meeting.as_mut().unwrap();
    let (me, program) = (meeting.rank(), Verified::plan(plan, Addressing::Apart).unwrap());
    assert!(program.ranks.len() <= meeting.world() as usize, "mpirun has to start more ranks");
    let report = if me.index() < program.ranks.len() {
        let peers = peers_of(&program, me).into_iter().collect();
        let links = meeting.connect(&peers, soon()).unwrap();
        let mut barrier = |_: Gate| {
            let cause = |e: crossmesh_comm::rendezvous::RendezvousError| e.to_string();
            meeting.barrier(soon()).map_err(|e| CommError::System { me, what: "wait", cause: cause(e) })
        };
        execute(program.rank(me), links, options, &mut barrier).unwrap_or_else(|e| panic!("{me}: {e}"))
    } else {
        let gates = if options.check { 2 } else { 1 };
        (0..gates * options.repeat).for_each(|_| meeting.barrier(soon()).unwrap());
        RankReport::idle(me)
    };
    let shared = meeting.share(serde_json::to_string(&report).unwrap(), soon()).unwrap();
    let parse = |text: &String| Ok(serde_json::from_str(text).unwrap());
    (0..).map(Rank).zip(shared.iter().map(parse)).take(program.ranks.len()).collect()
}

/// Several programs at once.
pub fn side_by_side() {
    let mut meeting = MEETING.lock().unwrap();
    let meeting = meeting.as_mut().unwrap();
    let me = meeting.rank();
    if me.0 < 4 {
        let others = (0..4).map(Rank).filter(|r| *r != me).collect();
        let links = meeting.connect(&others, soon()).unwrap();
        run_rank(me, links, &plans(), meeting.sharing());
    }
    meeting.barrier(soon()).unwrap();
}
