//! Ranks as threads of this process.

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::CollectiveOptions;
use crossmesh_core::id::Rank;

use super::{CallError, Collectives};
use crate::buffer::Sharing;
use crate::clock::Monotonic;
use crate::engine::{Engine, EngineOptions};
use crate::error::CommError;
use crate::transport::Link;
use crate::transport::mem::mesh;

type Links = Vec<(Rank, Box<dyn Link>)>;

impl Collectives {
    /// Runs the same program on so many ranks, each a thread, all on one host. Answers what each came to.
    pub fn in_threads<R: Send>(
        ranks: u32,
        program: impl Fn(&mut Collectives) -> Result<R, CallError> + Sync,
    ) -> Result<Vec<R>, CallError> {
        let cluster = Cluster::of_hosts(vec![Host::with_devices(ranks)]);
        Self::in_threads_of(&cluster, &CollectiveOptions::default(), program)
    }

    /// The same, with the ranks on the hosts of a cluster as far as planning is concerned.
    pub fn in_threads_of<R: Send>(
        cluster: &Cluster,
        options: &CollectiveOptions,
        program: impl Fn(&mut Collectives) -> Result<R, CallError> + Sync,
    ) -> Result<Vec<R>, CallError> {
        let links = mesh(cluster.num_devices()).map_err(|e| CommError::System {
            me: Rank(0),
            what: "link threads",
            cause: e.to_string(),
        })?;
        let run = |me: Rank, links: Links| {
            let engine = Engine::new(me, links, Box::new(Monotonic), EngineOptions::default())?;
            let (cluster, options) = (cluster.clone(), options.clone());
            let mut comm = Collectives::new(me, engine, cluster, Sharing::Private, options);
            let result = program(&mut comm)?;
            comm.close();
            Ok(result)
        };
        std::thread::scope(|scope| {
            let start = |(me, links)| scope.spawn(move || run(me, links));
            let threads: Vec<_> = (0..).map(Rank).zip(links).map(start).collect();
            threads.into_iter().map(|t| t.join().unwrap_or(Err(CallError::Panicked))).collect()
        })
    }
}
