//! The order of sends, on links that write down what they took; and that no turn oversleeps.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use crossmesh_core::id::{Rank, RegionId};
use crossmesh_core::program::{Moved, OpKind, Program, RankProgram};
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, Strategy, lower, plan};
use crossmesh_core::verify::Verified;
use rustix::event::{EventfdFlags, eventfd};

use super::{Engine, EngineOptions, JobSpec};
use crate::buffer::{RankBuffers, Sharing};
use crate::clock::{Clock, Monotonic};
use crate::device::Worker;
use crate::memory::place::Lent;
use crate::transport::{Control, Event, Expected, Link, LinkError, Message};

/// What was taken: message and bytes, in order.
type Taken = Arc<Mutex<Vec<(Message, Range<u64>)>>>;

struct Recorder {
    fd: OwnedFd,
    taken: Taken,
    full: Arc<AtomicBool>,
    sent: Vec<Event>,
    /// How often the engine turned to it, and told it that we live.
    asked: Arc<AtomicUsize>,
    beats: Beats,
    rank: Rank,
    /// Whether a device has to finish something for it.
    awaits: bool,
}

/// Whom we told that we live, and for whom we wait.
type Beats = Arc<Mutex<Vec<(Rank, Option<Rank>)>>>;

impl Link for Recorder {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
    fn wants_write(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        false
    }
    fn has_work(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        !self.sent.is_empty()
    }
    fn awaits_device(&self) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        self.awaits
    }
    fn expect(&mut self, _: Message, _: Expected) {}
    fn announce(&mut self, _: u32, _: &[u32]) {}
    fn has_room(&self) -> bool {
        !self.full.load(Ordering::Relaxed)
    }
    fn part_bytes(&self, _: u64) -> u64 {
        1000
    }
    fn send(&mut self, message: Message, part: Range<u64>, _: &Lent) {
        self.sent.push(Event::Sent { message, upto: part.end });
        self.taken.lock().unwrap().push((message, part));
    }
    fn control(&mut self, control: Control) {
        if let Control::Beat { waits_for } = control {
            self.beats.lock().unwrap().push((self.rank, waits_for));
        }
    }
    fn drop_data(&mut self) {}
    fn progress(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        self.flush(events)
    }
    fn flush(&mut self, events: &mut Vec<Event>) -> Result<(), LinkError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        events.append(&mut self.sent);
        Ok(())
    }
    fn shutdown(&mut self) {}
}

/// r0 sends the same 120 kB to r1 and to r2.
fn fan_out() -> Plan {
    let layout = |words: &str| words.parse().unwrap();
    let problem = Problem::pair(layout("u8[120000]@A{x:1}(_)"), layout("u8[120000]@B{x:2}(_)")).unwrap();
    plan(&problem, &PlanOptions { strategy: Strategy::SendRecv, ..Default::default() }).unwrap()
}

/// The job on r0, with these weights for its sends.
fn spec(plan: &Plan, id: u32, weights: [u64; 2]) -> JobSpec {
    let mut program = lower(plan);
    program.ranks[0].deps.clear();
    for (op, share) in program.ranks[0].ops.iter_mut().zip(weights) {
        op.deps = 0..0;
        if let OpKind::Send { weight, .. } = &mut op.kind {
            *weight = share;
        }
    }
    job_of(id, program)
}

fn job_of(id: u32, program: Program) -> JobSpec {
    let program = Verified::program(program).unwrap().rank(Rank(0));
    JobSpec::new(id, &RankBuffers::allocate(program, Sharing::Private).unwrap()).unwrap()
}

fn engine(taken: &Taken) -> Engine {
    engine_with_room(taken, &Arc::default())
}

fn engine_with_room(taken: &Taken, full: &Arc<AtomicBool>) -> Engine {
    engine_among(3, taken, full, &Arc::default(), &Beats::default(), &Standing::default())
}

fn engine_among(
    ranks: u32,
    taken: &Taken,
    full: &Arc<AtomicBool>,
    asked: &Arc<AtomicUsize>,
    beats: &Beats,
    clock: &Standing,
) -> Engine {
    let link = |rank| {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let (taken, full, asked, beats) = (taken.clone(), full.clone(), asked.clone(), beats.clone());
        Recorder { fd, taken, full, sent: vec![], asked, beats, rank, awaits: false }
    };
    let links = (1..ranks).map(Rank).map(|r| (r, Box::new(link(r)) as Box<dyn Link>)).collect();
    Engine::new(Rank(0), links, Box::new(clock.clone()), EngineOptions::default()).unwrap()
}

/// Time stands still until it is put forward.
#[derive(Debug, Clone, Default)]
struct Standing(Arc<AtomicU64>);

impl Clock for Standing {
    fn now_ns(&self) -> u64 {
        1 + self.0.load(Ordering::Relaxed)
    }
}

/// The receivers of these sends have a place for them: r1 for tag 0, r2 for tag 1.
fn ready(engine: &mut Engine, job: u32, tags: &[u32]) {
    tags.iter().for_each(|tag| engine.on_ready(Rank(tag + 1), job, &[*tag]).unwrap());
}

#[test]
fn sends_share_by_weight() {
    let (plan, taken) = (fan_out(), Taken::default());
    let mut engine = engine(&taken);
    let handle = engine.start(spec(&plan, 0, [300, 100])).unwrap();
    ready(&mut engine, 0, &[0, 1]);
    let report = engine.wait(handle).unwrap();
    assert_eq!(report.bytes_sent, 240_000);
    let taken = taken.lock().unwrap();
    let (mut heavy, mut light) = (0, 0);
    for (message, part) in taken.iter().take_while(|(m, p)| m.tag != 0 || p.end < 120_000) {
        *(if message.tag == 0 { &mut heavy } else { &mut light }) += part.end - part.start;
        let ahead = heavy as i64 - 3 * light as i64;
        assert!(ahead.abs() <= 4000, "{heavy} B against {light} B at weights 3 to 1");
    }
    assert!(light > 30_000);
}

#[test]
fn a_send_waits_until_its_receiver_is_ready() {
    let (plan, taken) = (fan_out(), Taken::default());
    let mut engine = engine(&taken);
    ready(&mut engine, 0, &[1]); // before the job has started here
    let handle = engine.start(spec(&plan, 0, [1, 1])).unwrap();
    assert!(!engine.test(handle).unwrap());
    assert!(taken.lock().unwrap().iter().all(|(m, _)| m.tag == 1));
    ready(&mut engine, 0, &[0]);
    assert!(engine.test(handle).unwrap());
}

#[test]
fn the_job_of_higher_priority_sends_first() {
    let (plan, taken) = (fan_out(), Taken::default());
    let mut engine = engine(&taken);
    let urgent = JobSpec { priority: 1, ..spec(&plan, 7, [1, 1]) };
    let handles = [engine.start(spec(&plan, 3, [1, 1])).unwrap(), engine.start(urgent).unwrap()];
    for job in [3, 7] {
        ready(&mut engine, job, &[0, 1]);
    }
    for handle in handles {
        assert_eq!(engine.wait(handle).unwrap().bytes_sent, 240_000);
    }
    let jobs: Vec<u32> = taken.lock().unwrap().iter().map(|(m, _)| m.job).collect();
    assert!(jobs.is_sorted_by(|a, b| a >= b), "{jobs:?}");
}

/// A heartbeat may be what empties a link; nothing else comes from it then.
#[test]
fn whoever_waits_for_room_hears_of_it_from_any_flush() {
    let (plan, taken, full) = (fan_out(), Taken::default(), Arc::new(AtomicBool::new(true)));
    let mut engine = engine_with_room(&taken, &full);
    let handle = engine.start(spec(&plan, 0, [1, 1])).unwrap();
    ready(&mut engine, 0, &[0, 1]);
    assert!(!engine.test(handle).unwrap());
    assert!(taken.lock().unwrap().is_empty());
    full.store(false, Ordering::Relaxed);
    (0..2).for_each(|peer| engine.flush(peer).unwrap());
    assert!(engine.test(handle).unwrap());
}

/// A pass that calls whoever drives the engine, again and again. Every call is there before the turn that has to see it: a
/// turn that slept on it would take a heartbeat, and all of them ten times what is allowed here.
#[test]
fn no_turn_sleeps_on_a_call_from_a_pass() {
    const CALLS: usize = 50;
    let mut engine = engine(&Taken::default());
    let (waker, (calls, desk), (reply, replies)) = (engine.waker(), channel(), channel());
    let (posted, is_posted) = channel();
    let compute = move |_| {
        for call in 0..CALLS {
            calls.send(call).unwrap();
            waker.wake();
            posted.send(()).unwrap();
            replies.recv().unwrap();
        }
        Ok(())
    };
    let worker = Worker::new(engine.waker(), Box::new(compute)).unwrap();
    engine.set_device(Box::new(worker)).unwrap();
    let handle = engine.start(one_pass()).unwrap();
    engine.test(handle).unwrap();
    let start = Monotonic.now_ns();
    for call in 0..CALLS {
        is_posted.recv().unwrap();
        engine.turn().unwrap();
        assert_eq!(desk.try_recv(), Ok(call));
        reply.send(()).unwrap();
    }
    let seconds = (Monotonic.now_ns() - start) as f64 * 1e-9;
    // A turn that slept on would take its ten seconds.
    assert!(seconds < 5.0, "{CALLS} calls took {seconds:.1} s");
    engine.wait(handle).unwrap();
}

/// The same, where a wait inside the engine took the wake.
#[test]
fn no_turn_sleeps_on_a_wake_that_something_else_took() {
    let (plan, taken) = (fan_out(), Taken::default());
    let mut engine = engine(&taken);
    let handle = engine.start(spec(&plan, 0, [1, 1])).unwrap();
    let start = Monotonic.now_ns();
    for _ in 0..50 {
        engine.waker().wake();
        engine.test(handle).unwrap();
        engine.turn().unwrap();
    }
    let seconds = (Monotonic.now_ns() - start) as f64 * 1e-9;
    assert!(seconds < 5.0, "50 turns took {seconds:.1} s");
}

/// A job that is one pass.
fn one_pass() -> JobSpec {
    let (needs, makes) = Default::default();
    let mut program = Program { ranks: vec![RankProgram::default()], ..Program::default() };
    let nothing = Moved { tensor: 0, region: RegionId(0), bytes: 0 };
    program.ranks[0].push(OpKind::Compute { pass: 0, nanos: 0, needs, makes }, nothing, &[]);
    job_of(0, program)
}

/// What a step costs depends on what happened, not on how many peers there are.
#[test]
fn peers_that_have_nothing_to_say_are_left_alone() {
    let (plan, taken, asked) = (fan_out(), Taken::default(), Arc::new(AtomicUsize::new(0)));
    let mut engine =
        engine_among(200, &taken, &Arc::default(), &asked, &Beats::default(), &Standing::default());
    let handle = engine.start(spec(&plan, 0, [1, 1])).unwrap();
    engine.test(handle).unwrap();
    asked.store(0, Ordering::Relaxed);
    for _ in 0..100 {
        engine.waker().wake();
        engine.turn().unwrap();
        assert!(!engine.test(handle).unwrap());
    }
    assert_eq!(asked.swap(0, Ordering::Relaxed), 0, "nothing has happened");
    ready(&mut engine, 0, &[0, 1]);
    engine.wait(handle).unwrap();
    // Two links took 120 parts each.
    assert!(asked.load(Ordering::Relaxed) < 240 * 8, "{asked:?}");
}

/// A wake does not say whose device it was: whoever waits for one is looked at, and nobody else.
#[test]
fn who_waits_for_a_device_is_looked_at_when_it_wakes_us() {
    let looked: Vec<Arc<AtomicUsize>> = (1..100).map(|_| Arc::default()).collect();
    let link = |(rank, asked): (u32, &Arc<AtomicUsize>)| {
        let (taken, full, beats) = Default::default();
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let (rank, awaits) = (Rank(rank), rank == 7);
        let link = Recorder { fd, taken, full, sent: vec![], asked: asked.clone(), beats, rank, awaits };
        (rank, Box::new(link) as Box<dyn Link>)
    };
    let links = (1..).zip(&looked).map(link).collect();
    let clock = Box::new(Standing::default());
    let mut engine = Engine::new(Rank(0), links, clock, EngineOptions::default()).unwrap();
    engine.flush(6).unwrap();
    engine.step(super::Until::Now).unwrap();
    looked.iter().for_each(|asked| asked.store(0, Ordering::Relaxed));
    for turns in 1..=5 {
        engine.waker().wake();
        engine.turn().unwrap();
        assert!(looked[6].load(Ordering::Relaxed) >= turns, "it is not looked at in turn {turns}");
    }
    let others: usize = looked.iter().map(|asked| asked.load(Ordering::Relaxed)).sum();
    assert_eq!(others, looked[6].load(Ordering::Relaxed), "others were looked at");
}

/// Two peers have something to do with us, eight do not.
#[test]
fn beats_are_few_where_nothing_is_waited_for() {
    let (plan, taken, beats, clock) = (fan_out(), Taken::default(), Beats::default(), Standing::default());
    let mut engine = engine_among(11, &taken, &Arc::default(), &Arc::default(), &beats, &clock);
    let handle = engine.start(spec(&plan, 0, [1, 1])).unwrap();
    let second = |engine: &mut Engine| {
        beats.lock().unwrap().clear();
        for _ in 0..10 {
            clock.0.fetch_add(100_000_000, Ordering::Relaxed);
            engine.test(handle).unwrap();
        }
        let told = std::mem::take(&mut *beats.lock().unwrap());
        let to = |few: fn(u32) -> bool| told.iter().filter(|(rank, _)| few(rank.0)).count();
        (to(|rank| rank <= 2), to(|rank| rank > 2))
    };
    // Nobody waits yet: but for two beats of us, nothing was late.
    let (busy, idle) = second(&mut engine);
    assert!(busy >= 8, "{busy} beats to those that we have something to do with");
    // A job that stands still for two beats waits, and then everybody is told.
    let (busy_later, idle_later) = second(&mut engine);
    assert!(busy_later >= 8 && idle_later > idle, "{idle} and then {idle_later} beats to the others");
}

#[test]
fn an_idle_rank_hardly_says_anything() {
    let (taken, beats, clock) = (Taken::default(), Beats::default(), Standing::default());
    let mut engine = engine_among(101, &taken, &Arc::default(), &Arc::default(), &beats, &clock);
    for _ in 0..100 {
        clock.0.fetch_add(100_000_000, Ordering::Relaxed);
        engine.step(super::Until::Now).unwrap();
    }
    let told = beats.lock().unwrap().len();
    assert!((400..=600).contains(&told), "{told} beats to 100 peers in ten seconds");
    // One of them waits, for somebody: it hears of us five times a second.
    beats.lock().unwrap().clear();
    engine.peers[0].waits_for = Some(Rank(7));
    for _ in 0..10 {
        clock.0.fetch_add(100_000_000, Ordering::Relaxed);
        engine.step(super::Until::Now).unwrap();
    }
    let told = beats.lock().unwrap().iter().filter(|(rank, _)| *rank == Rank(1)).count();
    assert!(told >= 4, "{told}");
}
