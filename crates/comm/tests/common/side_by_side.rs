//! Several programs at once on one engine: started in one order, waited for in another.

use crossmesh_comm::buffer::{RankBuffers, Sharing};
use crossmesh_comm::clock::Monotonic;
use crossmesh_comm::engine::{Engine, EngineOptions, JobSpec};
use crossmesh_comm::lab::pattern;
use crossmesh_core::id::Rank;
use crossmesh_core::reshard::lower::Addressing;
use crossmesh_core::reshard::{Plan, Strategy};
use crossmesh_core::verify::Verified;

use super::{Links, planned};

/// There and back again, and something small in between; all on ranks 0 to 3.
pub fn plans() -> Vec<Plan> {
    let reshard = |src: &str, dst: &str| planned(&[(src, dst)], Strategy::Flow, None);
    vec![
        reshard("f32[512,700]@A{x:2}=0-1(x,_)", "f32[512,700]@B{x:2}=2-3(_,x)"),
        reshard("f64[300,300]@B{x:4}=0-3(x,_)", "f64[300,300]@A{x:2}=0-1(_,x)"),
        reshard("i64[17]@A{x:4}=0-3(x)", "i64[17]@B{x:4}=3,2,1,0(x)"),
    ]
}

pub fn run_rank(rank: Rank, links: Links, plans: &[Plan], sharing: Sharing) {
    let options = EngineOptions { deadline_ms: 10_000, ..Default::default() };
    let mut engine = Engine::new(rank, links, Box::new(Monotonic), options).unwrap();
    let mut started = vec![];
    // Every rank starts them in an order of its own.
    for i in (0..plans.len()).map(|i| (i + rank.index()) % plans.len()) {
        let program = Verified::plan(&plans[i], Addressing::Apart).unwrap();
        if rank.index() >= program.ranks.len() {
            continue;
        }
        let buffers = RankBuffers::allocate(program.rank(rank), sharing).unwrap();
        pattern::fill_sources(&buffers).unwrap();
        pattern::poison_destinations(&buffers).unwrap();
        let mut spec = JobSpec::new(i as u32, &buffers).unwrap();
        spec.priority = i as u32;
        started.push((i, engine.start(spec).unwrap(), buffers));
        engine.test(started[0].1).unwrap();
    }
    for (i, handle, buffers) in started.into_iter().rev() {
        engine.wait(handle).unwrap();
        assert_eq!(pattern::check_destinations(&buffers).unwrap(), None, "{rank}, plan {i}");
    }
    engine.close();
}
