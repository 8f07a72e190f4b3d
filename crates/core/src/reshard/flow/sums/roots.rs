//! Where boxes are added up: roots.
//!
//! A root that adds its own part and wants the sum saves a message each way, so it is one of those where there are any;
//! among them, everybody is the root of its share.

use rustc_hash::FxHashMap;

/// A box that nodes (hosts, or devices of one host) have to add up; nodes rise.
#[derive(Debug, Clone)]
pub(super) struct Job {
    pub bytes: u64,
    pub adders: Vec<u32>,
    pub receivers: Vec<u32>,
}

/// Picks the root of every job; and whether all of them add a part.
pub(super) fn roots(jobs: &[Job], rates: &[f64]) -> (Vec<u32>, bool) {
    let mut rooted: FxHashMap<u32, u64> = FxHashMap::default();
    let mut roots = Vec::with_capacity(jobs.len());
    let mut all_add = true;
    for job in jobs {
        let adds = |n: &&u32| job.adders.binary_search(n).is_ok();
        let some_adds = job.receivers.iter().any(|n| adds(&n));
        all_add &= some_adds;
        let key = |n: &u32| rooted.get(n).copied().unwrap_or(0) as f64 / rates[*n as usize];
        let candidates = job.receivers.iter().filter(|n| !some_adds || adds(n)).copied();
        let root = candidates.min_by(|a, b| key(a).total_cmp(&key(b)).then(a.cmp(b)));
        let root = root.expect("a sum has receivers");
        *rooted.entry(root).or_default() += job.bytes;
        roots.push(root);
    }
    (roots, all_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everybody_is_the_root_of_its_share() {
        let job = |adders: &[u32], receivers: &[u32]| Job {
            bytes: 6,
            adders: adders.to_vec(),
            receivers: receivers.to_vec(),
        };
        // The fast one twice as often.
        let jobs = vec![job(&[0, 1], &[0, 1]); 3];
        assert_eq!(roots(&jobs, &[2.0, 1.0]), (vec![0, 1, 0], true));
        // A receiver with a part before others.
        assert_eq!(roots(&[job(&[0, 2], &[1, 2])], &[1.0; 3]), (vec![2], true));
        assert_eq!(roots(&[job(&[0], &[1, 2]), job(&[0], &[1, 2])], &[1.0; 3]), (vec![1, 2], false));
    }
}
