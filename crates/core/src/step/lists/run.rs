//! When everything in some ranks' lists happens.
//!
//! A call begins when its last member has started it and the links of all members are free, and keeps these busy until it ends; calls that are ready take turns as they
//! became so. So two strands of a rank share its link, and a slow member keeps its group waiting.

use super::{Item, List, ListError, check_order};

/// Where a rank's time went, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RankTimes {
    pub compute_ns: u64,
    /// It stood still for a call.
    pub exposed_ns: u64,
    pub end_ns: u64,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ran {
    pub ranks: Vec<RankTimes>,
    /// From when to when every call of every rank was under way.
    pub calls: Vec<Vec<(u64, u64)>>,
}

impl Ran {
    /// Until the last rank is done.
    pub fn end_ns(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.end_ns).max().unwrap_or(0)
    }

    /// The most that a rank stood still.
    pub fn exposed_ns(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.exposed_ns).max().unwrap_or(0)
    }
}

/// A call of a group on its way.
#[derive(Debug, Clone, Default)]
struct Meeting {
    /// Members that have started it, with the numbers it has in their lists.
    here: Vec<(usize, usize)>,
}

struct Runner<'a> {
    lists: &'a [&'a List],
    groups: &'a [Vec<usize>],
    clocks: Vec<u64>,
    at: Vec<usize>,
    times: Vec<RankTimes>,
    link_free: Vec<u64>,
    /// By group, its calls so far; and by rank and group, how many it has started.
    meetings: Vec<Vec<Meeting>>,
    started: Vec<Vec<usize>>,
    /// By rank and call.
    spans: Vec<Vec<Option<(u64, u64)>>>,
}

/// Runs lists, a rank each. `groups` has the members of every group, as indices into `lists`.
pub fn run(lists: &[&List], groups: &[Vec<usize>]) -> Result<Ran, ListError> {
    check_order(lists, groups)?;
    let ranks = lists.len();
    let mut runner = Runner {
        lists,
        groups,
        clocks: vec![0; ranks],
        at: vec![0; ranks],
        times: vec![RankTimes::default(); ranks],
        link_free: vec![0; ranks],
        meetings: vec![vec![]; groups.len()],
        started: vec![vec![0; groups.len()]; ranks],
        spans: lists.iter().map(|list| vec![None; list.calls().len()]).collect(),
    };
    while let Some(rank) = runner.next() {
        runner.step(rank);
    }
    for (rank, list) in lists.iter().enumerate() {
        if let Some(Item::Wait(call)) = list.items().get(runner.at[rank]) {
            return Err(ListError::Blocked { rank, group: list.calls()[*call].group });
        }
    }
    let times = runner.times.iter().zip(&runner.clocks).map(|(t, &end_ns)| RankTimes { end_ns, ..*t });
    let span = |span: Option<(u64, u64)>| span.expect("every call was started by all its members");
    Ok(Ran {
        ranks: times.collect(),
        calls: runner.spans.into_iter().map(|calls| calls.into_iter().map(span).collect()).collect(),
    })
}

impl Runner<'_> {
    /// The earliest rank that can go on: so starts come in the order of time.
    fn next(&self) -> Option<usize> {
        let can = |&rank: &usize| match self.lists[rank].items().get(self.at[rank]) {
            None => false,
            Some(Item::Wait(call)) => self.spans[rank][*call].is_some(),
            Some(_) => true,
        };
        let when = |rank: usize| match self.lists[rank].items()[self.at[rank]] {
            Item::Wait(call) => self.spans[rank][call].map_or(0, |span| span.1).max(self.clocks[rank]),
            _ => self.clocks[rank],
        };
        (0..self.lists.len()).filter(can).min_by_key(|&rank| (when(rank), rank))
    }

    fn step(&mut self, rank: usize) {
        match self.lists[rank].items()[self.at[rank]] {
            Item::Compute { ns } => {
                self.clocks[rank] += ns;
                self.times[rank].compute_ns += ns;
            }
            Item::Start(call) => self.start(rank, call),
            Item::Wait(call) => {
                let (_, end) = self.spans[rank][call].expect("it can go on");
                self.times[rank].exposed_ns += end.saturating_sub(self.clocks[rank]);
                self.clocks[rank] = self.clocks[rank].max(end);
            }
        }
        self.at[rank] += 1;
    }

    fn start(&mut self, rank: usize, call: usize) {
        let group = self.lists[rank].calls()[call].group.0 as usize;
        let place = self.started[rank][group];
        self.started[rank][group] += 1;
        let meetings = &mut self.meetings[group];
        meetings.resize(meetings.len().max(place + 1), Meeting::default());
        meetings[place].here.push((rank, call));
        if meetings[place].here.len() < self.groups[group].len() {
            return;
        }
        let here = std::mem::take(&mut meetings[place].here);
        let free = here.iter().map(|&(member, _)| self.link_free[member]).max().unwrap_or(0);
        // A member that computes less may think that it takes less; it takes as long as the longest says.
        let ns = here.iter().map(|&(member, call)| self.lists[member].calls()[call].ns).max().unwrap_or(0);
        let begin = self.clocks[rank].max(free);
        for (member, call) in here {
            self.link_free[member] = begin + ns;
            self.spans[member][call] = Some((begin, begin + ns));
        }
    }
}
