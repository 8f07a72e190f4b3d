//! Sharing work among nodes of different speed so that the last one ends as early as possible.
//!
//! A job is a number of bytes that any of its candidate nodes may send, in any split. The least time is where every
//! set of nodes can carry what only they may send; it is found exactly, as the fixed point of a maximum flow and its
//! minimum cut (Dinkelbach's method: the cut names the overloaded nodes, their load over their rate is the next guess):
//!
//! ```text
//! source --bytes--> job --> candidate node --seconds * rate--> sink
//! ```
//!
//! Candidates come in ranks of preference: at the least time, as much as possible goes to the first rank, then to the
//! second, and so on.

/// Bytes to be sent by some of its candidates.
#[derive(Debug, Clone, Default)]
pub(crate) struct Job {
    pub bytes: u64,
    /// Candidate nodes; those of one rank of preference lie side by side.
    pub candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    pub node: u32,
    /// 0 is the most preferred.
    pub preference: u8,
    /// The most this node may take of the job within its preference; the last rank of preference is not limited.
    pub most: u64,
}

/// The least time in which the jobs can be sent, not below `floor_s`. Nodes have `rates` bytes per second and carry
/// `loads` bytes already.
pub(crate) fn least_time(jobs: &[Job], rates: &[f64], loads: &[u64], floor_s: f64) -> (f64, Vec<u32>) {
    let (jobs, loads) = &without_fixed(jobs, loads);
    let mut network = FlowNetwork::new(jobs, rates.len());
    let (mut seconds, mut binding) = (floor_s, vec![]);
    for (node, (&rate, &load)) in rates.iter().zip(loads).enumerate() {
        if load as f64 / rate > seconds {
            (seconds, binding) = (load as f64 / rate, vec![node as u32]);
        }
    }
    if jobs.is_empty() {
        return (seconds, binding);
    }
    loop {
        network.reset(jobs, rates, loads, seconds);
        network.open(u8::MAX);
        let Some(overloaded) = network.push_all() else { return (seconds, binding) };
        let load: f64 =
            overloaded.nodes.iter().map(|&n| loads[n as usize] as f64).sum::<f64>() + overloaded.bytes as f64;
        let rate: f64 = overloaded.nodes.iter().map(|&n| rates[n as usize]).sum();
        // Rounding can leave a byte over at the right time; a cut that asks for no more time is that byte.
        if load / rate <= seconds * (1.0 + 1e-12) {
            seconds *= 1.0 + 1e-12;
            seconds += 1.0 / rate;
        } else {
            seconds = load / rate;
        }
        binding = overloaded.nodes;
    }
}

/// Shares the jobs so that every node is done after `seconds` (at least [`least_time`]), by preference.
pub(crate) fn share(
    jobs: &[Job],
    rates: &[f64],
    loads: &[u64],
    seconds: f64,
) -> Option<Vec<Vec<(u32, u64)>>> {
    if let Some(shares) = share_in_order(jobs, rates, loads, seconds) {
        return Some(shares);
    }
    let mut network = FlowNetwork::new(jobs, rates.len());
    network.reset(jobs, rates, loads, seconds);
    let mut rest = None;
    for preference in 0..=jobs.iter().flat_map(|j| &j.candidates).map(|c| c.preference).max().unwrap_or(0) {
        network.open(preference);
        rest = network.push_all();
    }
    if rest.is_some() {
        network.open(u8::MAX);
        rest = network.push_all();
    }
    rest.is_none().then(|| network.shares(jobs))
}

/// Jobs with one candidate are loads.
fn without_fixed(jobs: &[Job], loads: &[u64]) -> (Vec<Job>, Vec<u64>) {
    let mut loads = loads.to_vec();
    let mut free = vec![];
    for job in jobs.iter().filter(|j| j.bytes > 0) {
        match job.candidates.as_slice() {
            [only] => loads[only.node as usize] += job.bytes,
            _ => free.push(job.clone()),
        }
    }
    (free, loads)
}

/// Serves jobs one after the other, each by its preferences. Often enough there is room for all; then no flow has to
/// be computed.
fn share_in_order(jobs: &[Job], rates: &[f64], loads: &[u64], seconds: f64) -> Option<Vec<Vec<(u32, u64)>>> {
    let mut room: Vec<u64> =
        rates.iter().zip(loads).map(|(&rate, &load)| capacity(rate, seconds).saturating_sub(load)).collect();
    let mut shares = Vec::with_capacity(jobs.len());
    for job in jobs {
        let mut left = job.bytes;
        let mut share: Vec<(u32, u64)> = Vec::new();
        let last = job.candidates.iter().map(|c| c.preference).max().unwrap_or(0);
        for candidate in &job.candidates {
            let most = if candidate.preference == last { u64::MAX } else { candidate.most };
            let bytes = left.min(room[candidate.node as usize]).min(most);
            if bytes > 0 {
                room[candidate.node as usize] -= bytes;
                left -= bytes;
                match share.iter_mut().find(|(node, _)| *node == candidate.node) {
                    Some((_, taken)) => *taken += bytes,
                    None => share.push((candidate.node, bytes)),
                }
            }
        }
        if left > 0 {
            return None;
        }
        shares.push(share);
    }
    Some(shares)
}

/// What a node can send in a time, to the nearest byte.
fn capacity(rate: f64, seconds: f64) -> u64 {
    (rate * seconds).min(1e18).round() as u64
}

/// The jobs and nodes on the near side of a minimum cut.
struct Overloaded {
    bytes: u64,
    nodes: Vec<u32>,
}

/// Dinic's algorithm on the network above: vertices are the source, the jobs, the nodes, the sink.
struct FlowNetwork {
    num_jobs: usize,
    num_nodes: usize,
    /// Arcs in pairs, an arc and its reverse: `to[a]`, residual `room[a]`, reverse `a ^ 1`.
    to: Vec<u32>,
    room: Vec<u64>,
    arcs_of: Vec<Vec<u32>>,
    /// Arcs from jobs to candidates, with their preference and limit, in candidate order.
    choices: Vec<Choice>,
    level: Vec<u32>,
    next: Vec<u32>,
}

struct Choice {
    arc: u32,
    preference: u8,
    most: u64,
    last: bool,
}

impl FlowNetwork {
    fn new(jobs: &[Job], num_nodes: usize) -> Self {
        let num_vertices = jobs.len() + num_nodes + 2;
        let mut network = Self {
            num_jobs: jobs.len(),
            num_nodes,
            to: vec![],
            room: vec![],
            arcs_of: vec![vec![]; num_vertices],
            choices: vec![],
            level: vec![0; num_vertices],
            next: vec![0; num_vertices],
        };
        let (source, sink) = (network.source(), network.sink());
        for job in 0..jobs.len() {
            network.add_arc(source, job as u32);
        }
        for node in 0..num_nodes {
            network.add_arc((jobs.len() + node) as u32, sink);
        }
        for (j, job) in jobs.iter().enumerate() {
            let last = job.candidates.iter().map(|c| c.preference).max().unwrap_or(0);
            for c in &job.candidates {
                let arc = network.add_arc(j as u32, jobs.len() as u32 + c.node);
                let last = c.preference == last;
                network.choices.push(Choice { arc, preference: c.preference, most: c.most, last });
            }
        }
        network
    }

    fn source(&self) -> u32 {
        (self.num_jobs + self.num_nodes) as u32
    }

    fn sink(&self) -> u32 {
        self.source() + 1
    }

    fn add_arc(&mut self, from: u32, to: u32) -> u32 {
        let arc = self.to.len() as u32;
        self.to.extend([to, from]);
        self.room.extend([0, 0]);
        self.arcs_of[from as usize].push(arc);
        self.arcs_of[to as usize].push(arc + 1);
        arc
    }

    /// No flow, and room for what `seconds` allow; choices are closed.
    fn reset(&mut self, jobs: &[Job], rates: &[f64], loads: &[u64], seconds: f64) {
        self.room.fill(0);
        for (j, job) in jobs.iter().enumerate() {
            self.room[2 * j] = job.bytes;
        }
        for (n, (&rate, &load)) in rates.iter().zip(loads).enumerate() {
            self.room[2 * (self.num_jobs + n)] = capacity(rate, seconds).saturating_sub(load);
        }
    }

    /// Opens the choices of a preference; `u8::MAX` opens all of them without limits.
    fn open(&mut self, preference: u8) {
        for choice in &self.choices {
            if preference == u8::MAX || (choice.preference == preference && choice.last) {
                self.room[choice.arc as usize] = u64::MAX / 4;
            } else if choice.preference == preference {
                self.room[choice.arc as usize] = choice.most;
            }
        }
    }

    /// Pushes as much as possible; `None` if all jobs are served.
    fn push_all(&mut self) -> Option<Overloaded> {
        let (source, sink) = (self.source(), self.sink());
        while self.find_levels(source, sink) {
            self.next.fill(0);
            while self.augment(source, sink) {}
        }
        let unserved: u64 = (0..self.num_jobs).map(|j| self.room[2 * j]).sum();
        if unserved == 0 {
            return None;
        }
        // The last search marked what the source still reaches: the overloaded side of the cut.
        let reached = |vertex: usize| self.level[vertex] != u32::MAX;
        let bytes =
            (0..self.num_jobs).filter(|&j| reached(j)).map(|j| self.room[2 * j] + self.room[2 * j + 1]).sum();
        let nodes = (0..self.num_nodes).filter(|&n| reached(self.num_jobs + n)).map(|n| n as u32).collect();
        Some(Overloaded { bytes, nodes })
    }

    fn find_levels(&mut self, source: u32, sink: u32) -> bool {
        self.level.fill(u32::MAX);
        self.level[source as usize] = 0;
        let mut queue = std::collections::VecDeque::from([source]);
        while let Some(vertex) = queue.pop_front() {
            for &arc in &self.arcs_of[vertex as usize] {
                let to = self.to[arc as usize];
                if self.room[arc as usize] > 0 && self.level[to as usize] == u32::MAX {
                    self.level[to as usize] = self.level[vertex as usize] + 1;
                    queue.push_back(to);
                }
            }
        }
        self.level[sink as usize] != u32::MAX
    }

    /// Finds one path of rising levels and fills it. Iterative: paths can be as long as the network.
    fn augment(&mut self, source: u32, sink: u32) -> bool {
        let mut path: Vec<u32> = vec![];
        let mut at = source;
        while at != sink {
            let arcs = &self.arcs_of[at as usize];
            let step = arcs[self.next[at as usize] as usize..].iter().position(|&arc| {
                self.room[arc as usize] > 0
                    && self.level[self.to[arc as usize] as usize] == self.level[at as usize] + 1
            });
            match step {
                Some(skipped) => {
                    self.next[at as usize] += skipped as u32;
                    let arc = arcs[self.next[at as usize] as usize];
                    path.push(arc);
                    at = self.to[arc as usize];
                }
                None => {
                    // A dead end: never come here again in this phase.
                    self.next[at as usize] = arcs.len() as u32;
                    let Some(arc) = path.pop() else { return false };
                    at = self.to[arc as usize ^ 1];
                    self.next[at as usize] += 1;
                }
            }
        }
        let bytes = path.iter().map(|&arc| self.room[arc as usize]).min().unwrap_or(0);
        for arc in path {
            self.room[arc as usize] -= bytes;
            self.room[arc as usize ^ 1] += bytes;
        }
        true
    }

    fn shares(&self, jobs: &[Job]) -> Vec<Vec<(u32, u64)>> {
        let mut choices = self.choices.iter();
        let mut shares = Vec::with_capacity(jobs.len());
        for job in jobs {
            let mut share: Vec<(u32, u64)> = Vec::new();
            for candidate in &job.candidates {
                let choice = choices.next().expect("a choice for every candidate");
                let bytes = self.room[choice.arc as usize ^ 1];
                match share.iter_mut().find(|(node, _)| *node == candidate.node) {
                    _ if bytes == 0 => {}
                    Some((_, taken)) => *taken += bytes,
                    None => share.push((candidate.node, bytes)),
                }
            }
            shares.push(share);
        }
        shares
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn job(bytes: u64, nodes: &[u32]) -> Job {
        let candidates =
            nodes.iter().map(|&node| Candidate { node, preference: 0, most: u64::MAX }).collect();
        Job { bytes, candidates }
    }

    /// Every set of nodes has to carry what only it may send: all sets, one by one.
    fn least_time_by_subsets(jobs: &[Job], rates: &[f64], loads: &[u64]) -> f64 {
        let within = |job: &Job, set: u32| job.candidates.iter().all(|c| set >> c.node & 1 == 1);
        (1u32..1 << rates.len())
            .map(|set| {
                let members = (0..rates.len()).filter(|n| set >> n & 1 == 1);
                let rate: f64 = members.clone().map(|n| rates[n]).sum();
                let load: u64 = members.map(|n| loads[n]).sum();
                let bytes: u64 = jobs.iter().filter(|j| within(j, set)).map(|j| j.bytes).sum();
                (bytes + load) as f64 / rate
            })
            .fold(0.0, f64::max)
    }

    proptest! {
        #[test]
        fn least_time_is_the_worst_set_of_nodes(
            jobs in prop::collection::vec((1u64..1000, prop::collection::btree_set(0u32..5, 1..5)), 0..8),
            rates in prop::collection::vec(1u32..5, 5),
            loads in prop::collection::vec(0u64..500, 5),
        ) {
            let jobs: Vec<Job> = jobs.iter().map(|(bytes, nodes)| {
                job(bytes * 1000, &nodes.iter().copied().collect::<Vec<_>>())
            }).collect();
            let rates: Vec<f64> = rates.iter().map(|&r| f64::from(r)).collect();
            let loads: Vec<u64> = loads.iter().map(|l| l * 1000).collect();
            let (seconds, _) = least_time(&jobs, &rates, &loads, 0.0);
            let expected = least_time_by_subsets(&jobs, &rates, &loads);
            prop_assert!((seconds - expected).abs() <= 5.0 + 1e-9 * expected, "{} != {}", seconds, expected);

            let shares = share(&jobs, &rates, &loads, seconds).expect("the least time is enough");
            let mut sent = loads.clone();
            for (job, share) in jobs.iter().zip(&shares) {
                prop_assert_eq!(share.iter().map(|s| s.1).sum::<u64>(), job.bytes);
                for &(node, bytes) in share {
                    prop_assert!(job.candidates.iter().any(|c| c.node == node));
                    sent[node as usize] += bytes;
                }
            }
            for (node, &bytes) in sent.iter().enumerate() {
                prop_assert!(bytes as f64 <= rates[node] * seconds + 2.0);
            }
        }
    }

    #[test]
    fn prefers_the_first_candidates() {
        let prefer = |first: &[u32], then: &[u32]| -> Vec<Candidate> {
            let rank = |nodes: &[u32], preference| {
                nodes
                    .iter()
                    .map(move |&node| Candidate { node, preference, most: u64::MAX })
                    .collect::<Vec<_>>()
            };
            [rank(first, 0), rank(then, 1)].concat()
        };
        let jobs = [
            Job { bytes: 100, candidates: prefer(&[0], &[1]) },
            Job { bytes: 100, candidates: prefer(&[0], &[]) },
        ];
        let shares = share(&jobs, &[1.0, 1.0], &[0, 0], 150.0).unwrap();
        // The second job needs all of node 0 it can get; the first takes the rest of it.
        assert_eq!(shares, [vec![(0, 50), (1, 50)], vec![(0, 100)]]);
    }
}
