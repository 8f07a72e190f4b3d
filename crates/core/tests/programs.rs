//! Programs: what the verifier accepts runs right in every order, whatever was done to the program before.

use std::collections::BTreeMap;

use crossmesh_core::collective::{Call, Collective, Group};
use crossmesh_core::dtype::DType;
use crossmesh_core::id::Rank;
use crossmesh_core::program::Program;
use crossmesh_core::program::doc::{ProgramDoc, ProgramDocError};
use crossmesh_core::reshard::{PlanOptions, Problem, Strategy, lower, plan};
use crossmesh_core::verify::{Law, verify_program};
use crossmesh_testkit::interpret::{Sends, interpret};
use crossmesh_testkit::mutate_program::{Change, change};
use crossmesh_testkit::seed::{Seed, Shape, problem};
use crossmesh_testkit::simple::{self, Way};

/// How many changed programs to look at: `CROSSMESH_SWEEP` says more.
fn sweep(usual: usize) -> usize {
    std::env::var("CROSSMESH_SWEEP").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

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
    let wanted = sweep(6_000);
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
