//! Random faults, and whom everybody names.

use super::*;

/// A small generator: the same faults for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % below as u64) as usize
    }
}

/// What is done to whom, and when.
#[derive(Debug)]
struct Case {
    hosts: Vec<usize>,
    fault: SimFault,
    at_ns: u64,
    /// Where a stopped rank is continued.
    continued_ns: Option<u64>,
}

impl Case {
    fn of(seed: u64) -> Self {
        let mut dice = Dice(seed.wrapping_mul(0x9e3779b97f4a7c15) + 1);
        let n = 3 + dice.roll(40);
        let num_hosts = (2 + dice.roll(5)).min(n);
        let hosts: Vec<usize> = (0..n).map(|i| i * num_hosts / n).collect();
        let num_hosts = hosts.last().unwrap() + 1;
        // The root is as good a victim as all others together.
        let victim = if dice.roll(3) == 0 { 0 } else { dice.roll(n) };
        let other = |dice: &mut Dice, host: usize| (host + 1 + dice.roll(num_hosts - 1)) % num_hosts;
        let host = if dice.roll(3) == 0 { 0 } else { dice.roll(num_hosts) };
        let (fault, stops) = match dice.roll(5) {
            0 | 1 => (SimFault::Kill(victim), false),
            2 => (SimFault::Stop(victim), true),
            3 => (SimFault::Isolate(host), false),
            _ => (SimFault::Cut(host, other(&mut dice, host)), false),
        };
        // Before anybody is there; while they meet; after.
        let at_ns = match dice.roll(3) {
            0 => 0,
            1 => dice.roll(60) as u64 * MS + dice.roll(1000) as u64 * 1000,
            _ => 300 * MS + dice.roll(700) as u64 * MS,
        };
        let continued_ns =
            (stops && dice.roll(3) == 0).then(|| at_ns + (4_000 + dice.roll(2_000) as u64) * MS);
        Self { hosts, fault, at_ns, continued_ns }
    }

    fn run(&self) -> Sim {
        let n = self.hosts.len();
        let mut sim = Sim::new(&self.hosts, 3_000 * MS);
        sim.at(self.at_ns, Happens::Fault(self.fault));
        for i in 0..n {
            // A ring, and a chord: somebody waits for everybody.
            sim.processes[i].peers = [(i + 1) % n, (i + n / 2) % n].into_iter().filter(|p| *p != i).collect();
            sim.at((i as u64 * 7919) % 40 * MS, Happens::Start(i));
        }
        if let (Some(at), SimFault::Stop(i)) = (self.continued_ns, self.fault) {
            sim.at(at, Happens::Fault(SimFault::Continue(i)));
        }
        sim.run(12_000 * MS);
        sim
    }

    fn host_of(&self, rank: Rank) -> usize {
        self.hosts[rank.index()]
    }

    /// Whether a rank's answer is half of the truth, which is all that it can know: before it knew anybody, a cut way or cable looks like a
    /// rank that does not come. Such answers are counted apart.
    fn is_partial(&self, abort: &Abort) -> bool {
        let early = self.at_ns < 300 * MS;
        match (self.fault, &abort.or) {
            (SimFault::Isolate(_), Some(_)) | (SimFault::Cut(..), None) => early,
            (SimFault::Stop(_), Some(_)) => early,
            _ => false,
        }
    }

    /// Whether a rank's answer is right, or at least accuses nobody else.
    fn is_right(&self, by: usize, abort: &Abort) -> bool {
        let (culprit, or) = (abort.culprit, abort.or.as_ref().map(|or| or.0));
        let two_hosts = self.hosts.last() == Some(&1);
        match self.fault {
            // It was stopped before it came to itself, and only knows that it is late.
            SimFault::Stop(i) if by == i && self.at_ns < 300 * MS && or.is_some() => {
                culprit == Rank(i as u32)
            }
            SimFault::Kill(i) | SimFault::Stop(i) => (culprit, or) == (Rank(i as u32), None),
            SimFault::Break(..) | SimFault::Continue(_) => unreachable!("a test of its own"),
            SimFault::Isolate(host) => match or {
                // Where nobody can tell, both ends are named.
                Some(or) => {
                    (two_hosts || self.at_ns < 300 * MS)
                        && [culprit, or].iter().any(|r| self.host_of(*r) == host)
                }
                None => self.host_of(culprit) == host,
            },
            SimFault::Cut(a, b) => {
                let ends = BTreeSet::from([a, b]);
                let named = [Some(culprit), or].into_iter().flatten().map(|r| self.host_of(r)).collect();
                // Who never arrived is all that the root can say of it.
                ends == named
                    || (abort.text.starts_with("did not arrive") && ends.contains(&self.host_of(culprit)))
                    || (self.at_ns < 300 * MS && abort.text.contains("cut off") && self.hosts[by] == a.max(b))
            }
        }
    }

    /// Ranks that can say something: those not killed, nor stopped for good.
    fn survivors(&self) -> Vec<usize> {
        let out = match self.fault {
            SimFault::Kill(i) => Some(i),
            SimFault::Stop(i) if self.continued_ns.is_none() => Some(i),
            _ => None,
        };
        (0..self.hosts.len()).filter(|i| Some(*i) != out).collect()
    }
}

/// Complaints about a case.
fn wrong(case: &Case, sim: &Sim) -> Vec<String> {
    let mut wrong = vec![];
    for i in case.survivors() {
        let process = &sim.processes[i];
        match &process.heard {
            Some(abort) if case.is_right(i, abort) => {}
            Some(abort) => wrong.push(format!("r{i}: {abort}")),
            // Before it knew anybody, all it can do is knock in vain, which is `enter`'s to tell.
            None if process.node.is_none() => {}
            // A cut that nobody has to do with is none of ours.
            None if matches!(case.fault, SimFault::Cut(..)) && process.ready => {}
            None => wrong.push(format!("r{i} says nothing")),
        }
    }
    wrong
}

#[expect(clippy::disallowed_methods, reason = "how often to test is no part of a plan")]
#[test]
fn everybody_names_the_right_one() {
    let seeds: u64 = std::env::var("CROSSMESH_SWEEP").map_or(150, |n| n.parse::<u64>().unwrap() * 20);
    let (mut failed, mut partial) = (0, 0);
    for seed in 0..seeds {
        let case = Case::of(seed);
        let sim = case.run();
        let wrong = wrong(&case, &sim);
        let heard = |i: usize| sim.processes[i].heard.as_ref();
        let partly = case.survivors().into_iter().filter_map(heard).any(|abort| case.is_partial(abort));
        partial += usize::from(wrong.is_empty() && partly);
        if !wrong.is_empty() {
            failed += 1;
            if failed <= 12 {
                println!(
                    "seed {seed}: {:?} of {} ranks on {:?} at {} ms",
                    case.fault,
                    case.hosts.len(),
                    case.hosts.last(),
                    case.at_ns / MS
                );
                wrong.iter().take(4).for_each(|w| println!("    {w}"));
            }
        }
    }
    println!("{failed} of {seeds} wrong, {partial} partial: half of it is all that can be known");
    assert_eq!(failed, 0);
    assert!(partial < seeds as usize / 5, "{partial} of {seeds} partial");
}

/// r2 waits for r3, the way between their hosts is cut, and r2, alone on its host, says so as much later as is told. Whom everybody names.
fn cut_seen_after(late_ns: u64) -> BTreeSet<String> {
    let mut sim = Sim::new(&[0, 0, 1, 2, 2, 3, 3], 3_000 * MS);
    sim.processes[2].peers = vec![3];
    (0..7).for_each(|i| sim.at(0, Happens::Start(i)));
    sim.at(500 * MS, Happens::Fault(SimFault::Cut(1, 2)));
    sim.slow_observer = Some((2, late_ns));
    sim.run(12_000 * MS);
    sim.processes.iter().map(|p| p.heard.as_ref().map_or("nobody".into(), Abort::to_string)).collect()
}

#[test]
fn an_observer_that_is_late_makes_nobody_guilty() {
    let named = |late_ns: u64| cut_seen_after(late_ns).into_iter().collect::<Vec<_>>().join("\n");
    let both = "cannot tell between r2 on h1 and r3 on h2: ";
    let in_time = named(0);
    assert!(in_time.starts_with(&format!("{both}they do not reach each other")), "{in_time}");
    let a_little_late = named(300 * MS);
    assert_eq!(a_little_late, in_time, "there is time to wait for it");
    let too_late = named(5_000 * MS);
    assert!(too_late.starts_with(&format!("{both}r2 did not answer in time")), "{too_late}");
    assert!(!too_late.contains('\n'), "all say the same: {too_late}");
}

/// A rank whose connections break one way or another. It is well, and so is everybody else: either nothing comes of it, or
/// all end soon and name the right one. Whether the job ended, and what was wrong with that.
fn breaks(seed: u64) -> (bool, Option<String>) {
    let mut dice = Dice(seed.wrapping_mul(0x9e3779b97f4a7c15) + 5);
    let n = 3 + dice.roll(40);
    let hosts: Vec<usize> = (0..n).map(|i| i / 4).collect();
    let mut sim = Sim::new(&hosts, 3_000 * MS);
    let (victim, number) = (dice.roll(n), dice.roll(64));
    let how = [Break::HalfClosed, Break::NoticedHere, Break::Garbage, Break::Reset][dice.roll(4)];
    let at_ns =
        if dice.roll(2) == 0 { dice.roll(60_000) as u64 * 1000 } else { dice.roll(1_500) as u64 * MS };
    for i in 0..n {
        sim.processes[i].peers = vec![(i + 1) % n];
        sim.at((i as u64 * 7919) % 40 * MS, Happens::Start(i));
    }
    sim.at(at_ns, Happens::Fault(SimFault::Break(victim, number, how)));
    sim.run(12_000 * MS);
    let Some((i, peer)) = sim.broken else { return (false, None) };
    let goes_on = sim.processes.iter().all(|p| p.ready && p.heard.is_none());
    let ends = BTreeSet::from([Rank(i as u32), Rank(peer as u32)]);
    let is_right = |abort: &Abort| match (how, &abort.or) {
        (Break::Reset, Some((or, _))) => BTreeSet::from([abort.culprit, *or]) == ends,
        (Break::Reset, None) => false,
        (_, or) => abort.culprit == Rank(i as u32) && or.is_none(),
    };
    // While it still comes in, a rank may be all that the root ever heard of it.
    let early = |abort: &Abort| at_ns < 60 * MS && ends.contains(&abort.culprit);
    let in_time = |p: &Process| p.heard_ns <= at_ns.max(40 * MS) + 2_000 * MS;
    let ended = |p: &Process| p.heard.as_ref().is_some_and(|a| (is_right(a) || early(a)) && in_time(p));
    if goes_on || sim.processes.iter().all(ended) {
        return (!goes_on, None);
    }
    let said: Vec<String> = sim
        .processes
        .iter()
        .enumerate()
        .filter(|(_, p)| !ended(p))
        .take(3)
        .map(|(i, p)| match &p.heard {
            Some(abort) => format!("r{i} after {} ms: {abort}", p.heard_ns.saturating_sub(at_ns) / MS),
            None => format!("r{i} says nothing"),
        })
        .collect();
    let what = format!("{how:?} of r{i} with r{peer} of {n} at {} us", at_ns / 1000);
    (true, Some(format!("seed {seed}: {what}: {said:?}")))
}

#[expect(clippy::disallowed_methods, reason = "how often to test is no part of a plan")]
#[test]
fn a_connection_that_breaks_ends_the_job_or_does_no_harm() {
    let seeds: u64 = std::env::var("CROSSMESH_SWEEP").map_or(200, |n| n.parse::<u64>().unwrap() * 20);
    let results: Vec<(bool, Option<String>)> = (0..seeds).map(breaks).collect();
    let ended = results.iter().filter(|(ended, _)| *ended).count();
    let wrong: Vec<String> = results.into_iter().filter_map(|(_, wrong)| wrong).collect();
    println!("{ended} of {seeds} jobs ended, {} of them wrong", wrong.len());
    wrong.iter().take(12).for_each(|w| println!("{w}"));
    assert_eq!(wrong.len(), 0);
    assert!(ended > seeds as usize / 3, "most connections are needed");
}
