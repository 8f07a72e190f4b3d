//! Programs: what the verifier accepts runs right in every order, whatever was done to the program before.

use std::collections::BTreeMap;

use crossmesh_core::collective::{Call, Collective, Group};
use crossmesh_core::dtype::DType;
use crossmesh_core::id::{Rank, TransferId};
use crossmesh_core::program::Program;
use crossmesh_core::program::doc::{ProgramDoc, ProgramDocError};
use crossmesh_core::region::{Region, Span};
use crossmesh_core::reshard::{Plan, PlanOptions, Problem, Strategy, lower, plan};
use crossmesh_core::verify::{Law, verify, verify_program};
use crossmesh_testkit::interpret::{Sends, interpret};
use crossmesh_testkit::mutate_program::{Change, change};
use crossmesh_testkit::replay::run_program;
use crossmesh_testkit::seed::{Seed, Shape, problem};
use crossmesh_testkit::simple::{self, Way};
use crossmesh_testkit::sweep;

/// A program of some kind, small enough to be carried out byte by byte.
fn program(number: u64) -> Program {
    let mut seed = Seed(number);
    if number.is_multiple_of(5) {
        return collective(&mut seed);
    }
    let problem = problem(number, Shape::SMALL);
    if seed.below(3) == 0 {
        return lower(&simple::plan(&problem, seed.pick(&[Way::Direct, Way::Chain, Way::Ordered])));
    }
    let limit = (seed.below(3) == 0).then(|| 8 + seed.below(200) as u64);
    let strategy = seed.pick(&Strategy::CONCRETE);
    let options = PlanOptions { strategy, max_extra_bytes: limit, ..PlanOptions::default() };
    let planned = plan(&problem, &options).or_else(|_| plan(&problem, &PlanOptions::default()));
    lower(&planned.unwrap())
}

fn collective(seed: &mut Seed) -> Program {
    let ranks = 2 + seed.below(3) as u32;
    let group = Group::new((0..ranks).map(Rank).collect()).unwrap();
    let kind = seed.pick(&[Collective::AllReduce, Collective::ReduceScatter, Collective::AllGather]);
    let call = Call::new(kind, &group, DType::F32, 1 + seed.below(12) as u64);
    let hosts = vec![crossmesh_core::cluster::Host::with_devices(ranks)];
    let cluster = crossmesh_core::cluster::Cluster::of_hosts(hosts);
    let plan = crossmesh_core::collective::plan(&[call], &cluster, &Default::default()).unwrap();
    lower(&plan)
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

#[test]
fn changed_programs_are_refused_or_harmless() {
    let wanted = sweep::count(6_000);
    let mut seen: BTreeMap<Change, [usize; 2]> = BTreeMap::new();
    let mut count = 0;
    for number in 0.. {
        let good = program(number);
        if verify_program(&good).is_err() {
            continue; // of plans too simple for their sums
        }
        let mut seed = Seed(number);
        for kind in Change::ALL {
            let Some(changed) = change(&good, kind, &mut seed) else { continue };
            count += 1;
            let verdict = verify_program(&changed);
            seen.entry(kind).or_default()[usize::from(verdict.is_ok())] += 1;
            if verdict.is_ok() {
                runs_right(&changed, number, 3)
                    .unwrap_or_else(|e| panic!("program {number}, {kind:?} passes, but {e}\n{changed}"));
            }
        }
        if count >= wanted {
            break;
        }
    }
    for kind in Change::ALL {
        let [refused, harmless] = seen.get(&kind).copied().unwrap_or_default();
        assert!(refused + harmless > wanted / 200, "{kind:?}: {refused} refused, {harmless} harmless");
    }
    eprintln!("{count} changed programs, refused and harmless: {seen:?}");
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
    match seed.below(11) {
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
        let problem = problem(number, Shape::SMALL);
        let strategy = seed.pick(&Strategy::CONCRETE);
        let options = PlanOptions { strategy, ..PlanOptions::default() };
        let plan = plan(&problem, &options).or_else(|_| plan(&problem, &PlanOptions::default())).unwrap();
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
