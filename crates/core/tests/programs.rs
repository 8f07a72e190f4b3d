//! Programs: what the verifier accepts runs right in every order, whatever was done to the program before.

use std::collections::BTreeMap;

use crossmesh_core::cluster::{Cluster, Host};
use crossmesh_core::collective::{self, Algorithm, Call, Collective, CollectiveOptions, Group};
use crossmesh_core::dtype::DType;
use crossmesh_core::id::{Rank, TransferId};
use crossmesh_core::program::Program;
use crossmesh_core::program::doc::{ProgramDoc, ProgramDocError};
use crossmesh_core::region::{Region, Span};
use crossmesh_core::reshard::lower::{Addressing, lower_with};
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, Strategy, lower, plan};
use crossmesh_core::step::lower_step;
use crossmesh_core::verify::{Law, accepts_by_rank, verify, verify_for, verify_program};
use crossmesh_testkit::boxes;
use crossmesh_testkit::interpret::{Sends, interpret};
use crossmesh_testkit::mutate_program::{Change, change};
use crossmesh_testkit::replay::run_program;
use crossmesh_testkit::seed::{Seed, Shape, partial_destination, problem};
use crossmesh_testkit::simple::{self, Delivery};
use crossmesh_testkit::{steps, sweep};

/// Where a program comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Origin {
    /// A plan of some strategy, with and without a memory limit; or one made without much thought.
    Reshard,
    Boxes,
    /// The destination is a partial sum, too.
    PartialDestination,
    Collective,
    /// A collective, on one rank where its source lies.
    InPlace,
    /// Passes of a schedule, and what crosses between them.
    Step,
}

impl Origin {
    const ALL: [Origin; 6] = [
        Origin::Reshard,
        Origin::Boxes,
        Origin::PartialDestination,
        Origin::Collective,
        Origin::InPlace,
        Origin::Step,
    ];

    fn of(number: u64) -> Self {
        Self::ALL[number as usize % Self::ALL.len()]
    }
}

/// A program of some kind, small enough to be carried out byte by byte.
fn program(number: u64) -> Program {
    let mut seed = Seed(number);
    match Origin::of(number) {
        Origin::Reshard if seed.one_in(3) => {
            let problem = problem(number, Shape::SMALL);
            let delivery = seed.pick(&[Delivery::Direct, Delivery::Chain, Delivery::Ordered]);
            lower(&simple::plan(&problem, delivery))
        }
        Origin::Collective => lower(&collective(&mut seed)),
        Origin::InPlace => {
            let plan = collective(&mut seed);
            let rank = Rank::at(seed.below(plan.problem.topology.num_ranks()));
            lower_with(&plan, Addressing::InPlace(rank))
        }
        Origin::Step => Program::clone(&lower_step(&steps::step(number)).unwrap().program),
        _ => lower(&planned(&random_problem(number), &mut seed)),
    }
}

/// A problem of the number's origin; one that axes split where that is no problem.
fn random_problem(number: u64) -> Problem {
    match Origin::of(number) {
        Origin::Boxes => boxes::small_problem(number),
        Origin::PartialDestination => partial_destination(number, 9),
        _ => problem(number, Shape::SMALL),
    }
}

/// A plan by any strategy, under a limit or none; ours where that one has none.
fn planned(problem: &Problem, seed: &mut Seed) -> Plan {
    let limit = (seed.below(3) == 0).then(|| 8 + seed.below(200) as u64);
    let strategy = seed.pick(&Strategy::CONCRETE);
    let options = PlanOptions { strategy, max_extra_bytes: limit, ..PlanOptions::default() };
    plan(problem, &options).or_else(|_| plan(problem, &PlanOptions::default())).unwrap()
}

fn collective(seed: &mut Seed) -> Plan {
    let ranks = 2 + seed.below(3) as u32;
    let group = Group::new((0..ranks).map(Rank).collect()).unwrap();
    let kind = seed.pick(&[Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather]);
    let call = Call::new(kind, &group, DType::F32, 1 + seed.below(12) as u64);
    let hosts = (0..ranks).step_by(2).map(|first| Host::with_devices((ranks - first).min(2)));
    let hosts = if seed.one_in(2) { hosts.collect() } else { vec![Host::with_devices(ranks)] };
    let algorithm = if seed.one_in(2) { Algorithm::Auto } else { seed.pick(&Algorithm::CONCRETE) };
    let options = CollectiveOptions { algorithm, ..CollectiveOptions::default() };
    collective::plan(&[call], &Cluster::of_hosts(hosts), &options).unwrap()
}

/// Runs with both kinds of sends in several orders; an error if any goes wrong or they differ.
fn runs_right(program: &Program, seed: u64, orders: u64) -> Result<(), String> {
    let mut first = None;
    for order in 0..orders {
        for sends in Sends::ALL {
            let outcome =
                interpret(program, sends, seed ^ (order << 40)).map_err(|e| format!("{sends:?}: {e}"))?;
            if *first.get_or_insert_with(|| outcome.clone()) != outcome {
                return Err(format!("{sends:?}: a sum depends on the order of messages"));
            }
        }
    }
    Ok(())
}

/// Changes programs until `wanted` are changed, and panics if one passes that goes wrong.
fn change_programs(wanted: usize, numbers: impl Iterator<Item = u64>) -> Seen {
    let mut seen = Seen::new();
    let mut count = 0;
    for number in numbers {
        let good = program(number);
        if verify_program(&good).is_err() {
            continue; // of plans too simple for their sums, and algorithms that need two places
        }
        let mut seed = Seed(number);
        for kind in Change::ALL {
            let Some(changed) = change(&good, kind, &mut seed) else { continue };
            count += 1;
            let verdict = verify_program(&changed);
            seen.entry((Origin::of(number), kind)).or_default()[usize::from(verdict.is_ok())] += 1;
            if verdict.is_ok() {
                runs_right(&changed, number, 3)
                    .unwrap_or_else(|e| panic!("program {number}, {kind:?} passes, but {e}\n{changed}"));
            }
        }
        if count >= wanted {
            break;
        }
    }
    seen
}

/// By origin and change: how many were refused, and how many harmless.
type Seen = BTreeMap<(Origin, Change), [usize; 2]>;

fn total(seen: &Seen, of: impl Fn(&(Origin, Change)) -> bool) -> [usize; 2] {
    let counts = seen.iter().filter(|(key, _)| of(key)).map(|(_, count)| *count);
    counts.fold([0, 0], |sum, [refused, harmless]| [sum[0] + refused, sum[1] + harmless])
}

#[test]
fn changed_programs_are_refused_or_harmless() {
    let wanted = sweep::count(6_000);
    let seen = change_programs(wanted, sweep::first()..);
    for origin in Origin::ALL {
        let [refused, harmless] = total(&seen, |(o, _)| *o == origin);
        eprintln!("{origin:?}: {refused} changed programs refused, {harmless} harmless");
        assert!(refused.min(harmless) > wanted / 100, "{origin:?}: {refused} refused, {harmless} harmless");
    }
    for kind in Change::ALL {
        let [refused, harmless] = total(&seen, |(_, k)| *k == kind);
        eprintln!("{kind:?}: {refused} refused, {harmless} harmless");
        let least = if kind.is_of_passes() { wanted / 500 } else { wanted / 200 };
        assert!(refused + harmless > least, "{kind:?}: {refused} refused, {harmless} harmless");
    }
}

/// A plan without order and without sums: those are proven rank by rank.
fn unordered_plan(number: u64) -> Option<Plan> {
    let mut seed = Seed(number);
    let problem = match number % 2 {
        0 => problem(number, Shape { partial: false, ..Shape::SMALL }),
        _ => boxes::small_problem(number),
    };
    let plan = match seed.below(3) {
        0 => simple::plan(&problem, Delivery::Direct),
        1 => planned(&problem, &mut seed),
        _ => plan(&problem, &PlanOptions { strategy: Strategy::SendRecv, ..PlanOptions::default() }).ok()?,
    };
    (verify(&plan).is_ok() && accepts_by_rank(&plan, &lower(&plan))).then_some(plan)
}

/// The proof rank by rank lowers for itself. Here it gets programs that lowering did not make: what it lets pass, the proof of the
/// whole program does, too.
#[test]
fn what_passes_rank_by_rank_passes_whole() {
    let wanted = sweep::count(4_000);
    let (mut refused, mut harmless, mut careful) = (BTreeMap::new(), BTreeMap::new(), 0);
    let mut count = 0;
    for number in sweep::first().. {
        let Some(plan) = unordered_plan(number) else { continue };
        let (good, mut seed) = (lower(&plan), Seed(number));
        for kind in Change::ALL {
            let Some(changed) = change(&good, kind, &mut seed) else { continue };
            count += 1;
            let whole = verify_for(&changed, &plan.problem);
            if accepts_by_rank(&plan, &changed) {
                whole.unwrap_or_else(|e| panic!("plan {number}, {kind:?} passes, but {e}\n{changed}"));
                *harmless.entry(kind).or_insert(0) += 1;
            } else {
                careful += usize::from(whole.is_ok());
                *refused.entry(kind).or_insert(0) += 1;
            }
        }
        if count >= wanted {
            break;
        }
    }
    eprintln!(
        "refused {refused:?}\nharmless {harmless:?}\n{careful} are refused that the whole proof lets pass"
    );
    // Where nothing is added up and nothing waits for anything else, these cannot be.
    let cannot_be = |kind: &Change| {
        use Change::{FlipReduce, RemoveDependency, StreamDependency, SwapDependent};
        kind.is_of_passes()
            || matches!(kind, FlipReduce | SwapDependent | RemoveDependency | StreamDependency)
    };
    for kind in Change::ALL.into_iter().filter(|kind| !cannot_be(kind)) {
        let seen = refused.get(&kind).unwrap_or(&0) + harmless.get(&kind).unwrap_or(&0);
        assert!(seen > wanted / 1000, "{kind:?}: {seen} programs");
    }
    let harmless: usize = harmless.values().sum();
    assert!(harmless > wanted / 200, "{harmless} harmless");
}

#[test]
fn documents_carry_programs() {
    for number in 0..200 {
        let good = program(number);
        let doc = ProgramDoc::parse(&ProgramDoc::new(&good, None).to_json()).unwrap();
        let read = doc.to_program().unwrap();
        assert_eq!(verify_program(&read), verify_program(&good), "program {number}");
        assert_eq!(ProgramDoc::new(&read, None), doc, "program {number}");
    }
}

#[test]
fn bad_documents_are_named() {
    let (src, dst) = ("f32[8,6]@A{tp:2}(tp,_)", "f32[8,6]@B{tp:3}(_,tp)");
    let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
    let good = lower(&plan(&problem, &PlanOptions::default()).unwrap());
    let good = ProgramDoc::new(&good, None).to_json();
    assert!(matches!(ProgramDoc::parse(&good[..good.len() / 2]), Err(ProgramDocError::Json { .. })));
    let newer = good.replace("crossmesh.program/1", "crossmesh.program/2");
    assert!(matches!(ProgramDoc::parse(&newer), Err(ProgramDocError::NewerSchema { .. })));
    let other = good.replace("crossmesh.program/1", "crossmesh.plan/1");
    assert!(matches!(ProgramDoc::parse(&other), Err(ProgramDocError::UnknownSchema { .. })));

    let doc = |edit: &dyn Fn(&mut ProgramDoc)| {
        let mut doc = ProgramDoc::parse(&good).unwrap();
        edit(&mut doc);
        doc
    };
    let law = |edit: &dyn Fn(&mut ProgramDoc)| {
        let error = verify_program(&doc(edit).to_program().unwrap()).unwrap_err();
        (error.law(), error.to_string())
    };
    let busy =
        |doc: &ProgramDoc| doc.ranks.iter().position(|r| !r.ops.is_empty() && !r.tiles.is_empty()).unwrap();
    assert!(matches!(
        doc(&|d| d.num_ranks = u32::MAX).to_program(),
        Err(ProgramDocError::TooManyRanks { .. })
    ));
    assert!(matches!(doc(&|d| d.ranks[0].rank = 999).to_program(), Err(ProgramDocError::NoSuchRank { .. })));
    assert!(matches!(
        doc(&|d| d.ranks.push(d.ranks[0].clone())).to_program(),
        Err(ProgramDocError::RankTwice { .. })
    ));
    assert!(matches!(doc(&|d| d.boxes[0] = vec![[5, 2]]).to_program(), Err(ProgramDocError::BadBox { .. })));
    let elsewhere = doc(&|d| {
        let at = busy(d);
        d.ranks[at].buffers[0].memory = Some("disk".into());
    });
    let elsewhere = elsewhere.to_program().unwrap_err().to_string();
    assert!(elsewhere.ends_with("buffer 0: `memory` cannot be disk"), "{elsewhere}");
    let unknown_buffer = law(&|d| {
        let at = busy(d);
        d.ranks[at].tiles[0].buffer = 99;
    });
    assert_eq!(unknown_buffer.0, Law::Malformed);
    assert!(unknown_buffer.1.contains("names buffer 99, there are"), "{}", unknown_buffer.1);
    let outside = law(&|d| {
        let last = d.boxes.len() as u32;
        d.boxes.push(vec![[0, 1 << 40]; d.tensors[0].shape.len()]);
        let at = busy(d);
        d.ranks[at].tiles[0].region = last;
    });
    assert_eq!(outside.0, Law::Malformed, "{}", outside.1);
    let huge = law(&|d| d.tensors[0].shape.iter_mut().for_each(|len| *len = u64::MAX));
    assert_eq!(huge.0, Law::Malformed, "{}", huge.1);
    // 2^64 fits into no size at all.
    for field in ["\"offset\":0", "\"bytes\":"] {
        let (before, after) = good.split_once(field).unwrap();
        let after = after.trim_start_matches(|c: char| c.is_ascii_digit());
        let name = field.split(':').next().unwrap();
        let text = format!("{before}{name}:18446744073709551616{after}");
        let error = ProgramDoc::parse(&text).unwrap_err();
        assert!(matches!(error, ProgramDocError::Json { .. }), "{field}: {error}");
    }
    let huge = law(&|d| {
        let at = busy(d);
        d.ranks[at].tiles[0].offset = u64::MAX;
    });
    assert_eq!(huge.0, Law::Malformed, "{}", huge.1);
    let cyclic = law(&|d| {
        let at = busy(d);
        d.ranks[at].ops[0].after = vec![0];
    });
    assert_eq!(cyclic.0, Law::Deadlock, "{}", cyclic.1);
}

#[test]
fn damaged_documents_never_panic() {
    let mut passed = 0;
    for number in 0..4000u64 {
        let mut seed = Seed(number);
        let mut text = ProgramDoc::new(&program(number % 40), None).to_json().into_bytes();
        for _ in 0..1 + seed.below(3) {
            let at = seed.below(text.len());
            match seed.below(3) {
                0 => text[at] = seed.pick(b"0123456789-[]{},:\"e."),
                1 => text.insert(at, seed.pick(b"0123456789-[]{},:\"e.")),
                _ => drop(text.remove(at)),
            }
        }
        let Ok(doc) = ProgramDoc::parse(&String::from_utf8(text).unwrap()) else { continue };
        let Ok(program) = doc.to_program() else { continue };
        passed += 1;
        if verify_program(&program).is_ok() {
            runs_right(&program, number, 1).unwrap_or_else(|e| panic!("document {number} passes, but {e}"));
        }
    }
    assert!(passed > 100, "only {passed} documents could still be read");
}

/// A transfer as it is changed: source, destination, box, `after`, `reduce`, `then_own`, tensor.
type Draft = (Rank, Rank, Region, Vec<usize>, bool, bool, u32);

/// The same plan with one transfer changed, in any way that a file could say.
fn changed_plan(plan: &Plan, seed: &mut Seed) -> Option<Plan> {
    let index = |list: &[TransferId]| list.iter().map(|a| a.index()).collect::<Vec<usize>>();
    let drafts = plan.transfers().iter();
    let mut drafts: Vec<Draft> = drafts
        .map(|t| {
            let region = plan.region(t).clone();
            (t.src, t.dst, region, index(plan.after(t)), t.reduce, t.then_own, t.tensor)
        })
        .collect();
    let (n, ranks) = (drafts.len(), plan.problem.topology.num_ranks());
    let i = if n == 0 { return None } else { seed.below(n) };
    let partial = plan.problem.reshards[drafts[i].6 as usize].src.layout.num_contributions() > 1;
    match seed.below(12) {
        0 => drafts[i].0 = Rank::at(seed.below(ranks)),
        1 => drafts[i].1 = Rank::at(seed.below(ranks)),
        kind @ 2..=4 => {
            let dim = seed.below(drafts[i].2.num_dims().max(1));
            let span = *drafts[i].2.spans().get(dim)?;
            let len = plan.problem.reshards[drafts[i].6 as usize].src.layout.shape()[dim];
            let (start, end) = match kind {
                2 => (span.start.saturating_sub(1), (span.end + 1).min(len)),
                3 => (span.start + u64::from(span.len() > 1), span.end),
                _ => (0, len),
            };
            drafts[i].2 = drafts[i].2.with_span(dim, Span::new(start, end));
        }
        5 => drop((seed.below(drafts[i].3.len().max(1)) < drafts[i].3.len()).then(|| drafts[i].3.pop())),
        6 => drafts[i].3.push(seed.below(n)),
        7 => drafts[i].4 = partial && !drafts[i].4,
        8 => drafts.push(drafts[i].clone()),
        9 => drafts[i].5 = partial && !drafts[i].5,
        10 => {
            // Gone; who waited for it waits for what it waited for.
            let gone = drafts.remove(i);
            for draft in &mut drafts {
                if draft.3.contains(&i) {
                    draft.3.extend(&gone.3);
                }
                draft.3.retain(|a| *a != i);
                draft.3.iter_mut().filter(|a| **a > i).for_each(|a| *a -= 1);
            }
        }
        _ => {
            // Two transfers change places; who waits for whom stays.
            let j = seed.below(n);
            drafts.swap(i, j);
            let moved = |a: usize| {
                if a == i {
                    j
                } else if a == j {
                    i
                } else {
                    a
                }
            };
            drafts.iter_mut().for_each(|d| d.3.iter_mut().for_each(|a| *a = moved(*a)));
        }
    }
    let mut changed = Plan::new(plan.problem.clone(), "changed", plan.chunk_bytes);
    for (src, dst, region, mut after, reduce, then_own, tensor) in drafts {
        after.sort_unstable();
        after.dedup();
        let region = changed.add_region(region);
        let after: Vec<TransferId> = after.into_iter().map(TransferId::at).collect();
        let id = changed.add(tensor, src, dst, region, &after);
        (changed.transfer_mut(id).reduce, changed.transfer_mut(id).then_own) = (reduce, then_own);
    }
    Some(changed)
}

#[test]
fn changed_plans_are_refused_or_harmless() {
    let wanted = sweep::count(6_000);
    let (mut count, mut harmless) = (0, 0);
    for number in 0.. {
        let mut seed = Seed(number);
        let plan = match Origin::of(number) {
            Origin::Collective | Origin::InPlace => collective(&mut seed),
            _ => planned(&random_problem(number), &mut seed),
        };
        for _ in 0..8 {
            let Some(changed) = changed_plan(&plan, &mut seed) else { break };
            count += 1;
            if verify(&changed).is_ok() {
                harmless += 1;
                run_program(&changed, &lower(&changed), number)
                    .unwrap_or_else(|e| panic!("plan {number} passes, but {e}\n{}", lower(&changed)));
            }
        }
        if count >= wanted {
            break;
        }
    }
    eprintln!("{count} changed plans, {harmless} of them harmless");
    assert!(harmless > wanted / 50 && harmless < count * 3 / 4, "{harmless} of {count} pass");
}
