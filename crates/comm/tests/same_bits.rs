//! All ranks that get a sum get the same bits, whatever the algorithm.

use crossmesh_comm::collectives::{Collectives, Reduction};
use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::{Algorithm, CollectiveOptions};

fn sums(cluster: &Cluster, algorithm: Algorithm, len: usize) -> Vec<Vec<f64>> {
    let options = CollectiveOptions { algorithm, ..CollectiveOptions::default() };
    let sums = Collectives::in_threads_of(cluster, &options, |comm| {
        let all = comm.world()?;
        let me = f64::from(comm.rank().0);
        let mut x: Vec<f64> = (0..len).map(|i| ((i as f64 + 1.3) * (me + 0.7)).sin()).collect();
        comm.all_reduce(all, &mut x, Reduction::Sum)?;
        Ok(x)
    });
    sums.unwrap()
}

#[test]
fn sums_are_the_same_everywhere() {
    for hosts in [&[3][..], &[4], &[2, 3], &[1, 1, 1, 2]] {
        let cluster = Cluster::of_hosts(hosts.iter().map(|n| Host::with_devices(*n)).collect());
        for algorithm in Algorithm::CONCRETE.into_iter().chain([Algorithm::Auto]) {
            for len in [1, 7, 1000, 40_000] {
                let sums = sums(&cluster, algorithm, len);
                for (rank, sum) in sums.iter().enumerate() {
                    let wrong = sum.iter().zip(&sums[0]).position(|(a, b)| a.to_bits() != b.to_bits());
                    assert_eq!(wrong, None, "{algorithm} over {hosts:?}, {len} elements: rank {rank}");
                }
            }
        }
    }
}
