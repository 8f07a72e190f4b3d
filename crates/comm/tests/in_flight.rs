//! Several programs at once on the same engines: started in one order, waited for in another.

mod common;

use common::side_by_side::{plans, run_rank};
use common::{KINDS, Kind, Links, link_pair};
use crossmesh_comm::buffer::Sharing;
use crossmesh_core::id::Rank;

fn mesh_of_links(kind: Kind, ranks: u32) -> Vec<Links> {
    let mut links: Vec<Links> = (0..ranks).map(|_| vec![]).collect();
    for (a, b) in (0..ranks).flat_map(|b| (0..b).map(move |a| (a, b))) {
        let (x, y) = link_pair(kind, Rank(a), Rank(b));
        links[a as usize].push((Rank(b), x));
        links[b as usize].push((Rank(a), y));
    }
    links
}

#[test]
fn programs_run_side_by_side() {
    let plans = plans();
    for kind in KINDS {
        let sharing = if kind == Kind::Shm { Sharing::Host } else { Sharing::Private };
        std::thread::scope(|scope| {
            for (rank, links) in (0..).map(Rank).zip(mesh_of_links(kind, 4)) {
                let plans = &plans;
                scope.spawn(move || run_rank(rank, links, plans, sharing));
            }
        });
    }
}
