//! A law at a time, on plans and programs small enough to read. The laws over many plans are in tests/verifier.rs.

use super::*;
use crate::id::{RegionId, TransferId};
use crate::program::messages::MatchError;
use crate::program::{Dep, DepKind, OpKind, TileId};
use crate::region::{Region, Span};
use crate::reshard::{Problem, lower};

fn empty_plan(src: &str, dst: &str) -> Plan {
    let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
    Plan::new(problem, "by hand", 1)
}

/// Adds a transfer of elements `span` of a tensor with one dim.
fn add(plan: &mut Plan, src: u32, dst: u32, span: (u64, u64), after: &[u32]) -> TransferId {
    let region = plan.add_region(Region::new(vec![Span::new(span.0, span.1)]));
    let after: Vec<TransferId> = after.iter().copied().map(TransferId).collect();
    plan.add(0, Rank(src), Rank(dst), region, &after)
}

/// r0 to r1, and on to r2.
fn chain() -> Plan {
    let mut plan = empty_plan("f32[4]@A{x:1}(_)", "f32[4]@B{x:2}(_)");
    add(&mut plan, 0, 1, (0, 4), &[]);
    add(&mut plan, 1, 2, (0, 4), &[0]);
    plan
}

fn message(plan: &Plan) -> (Law, String) {
    let error = verify(plan).unwrap_err();
    (error.law(), error.to_string().lines().next().unwrap().into())
}

#[test]
fn a_good_plan_is_proven() {
    let proof = verify(&chain()).unwrap();
    assert_eq!(
        proof.to_string(),
        "every element arrives exactly once: 32 B in 2 transfers, no deadlock, no extra memory"
    );
}

#[test]
fn coverage_names_what_is_missing_or_doubled() {
    let mut plan = empty_plan("f32[4]@A{x:1}(_)", "f32[4]@B{x:1}(_)");
    add(&mut plan, 0, 1, (0, 3), &[]);
    assert_eq!(message(&plan), (Law::Coverage, "r1 never gets [3:4] of tensor 0".into()));
    add(&mut plan, 0, 1, (2, 4), &[]);
    assert_eq!(message(&plan), (Law::Coverage, "r1 gets [2:3] of tensor 0 twice: by the receive of t0 on r1 from r0, and by the receive of t1 on r1 from r0".into()));

    let mut kept = empty_plan("f32[4]@A{x:2}(x)", "f32[4]@A{x:2}(_)");
    add(&mut kept, 0, 1, (0, 2), &[]);
    add(&mut kept, 1, 0, (2, 4), &[]);
    assert!(verify(&kept).is_ok());
    add(&mut kept, 1, 0, (0, 2), &[0]);
    let (law, text) = message(&kept);
    assert_eq!(law, Law::Coverage);
    assert!(
        text.contains("r0 gets [0:2] of tensor 0 twice: by the copy that is op 0 of r0, and by the receive of t2 on r0 from r1"),
        "{text}"
    );
}

#[test]
fn causality_names_what_a_sender_lacks() {
    let mut plan = empty_plan("f32[4]@A{x:1}(_)", "f32[4]@B{x:2}(_)");
    add(&mut plan, 0, 1, (0, 4), &[]);
    add(&mut plan, 1, 2, (0, 4), &[]);
    assert_eq!(message(&plan), (Law::Causality, "t1 sends [0:4] from r1, which does not hold [0:4]".into()));

    // Two boxes together make up what is sent on.
    let mut plan = empty_plan("f32[4]@A{x:1}(_)", "f32[4]@B{x:2}(_)");
    add(&mut plan, 0, 1, (0, 1), &[]);
    add(&mut plan, 0, 1, (1, 4), &[]);
    add(&mut plan, 1, 2, (0, 4), &[0, 1]);
    assert!(verify(&plan).is_ok());
}

#[test]
fn a_cycle_is_named() {
    let mut plan = empty_plan("f32[4]@A{x:2}(x)", "f32[4]@B{x:1}(_)");
    add(&mut plan, 0, 2, (0, 2), &[1]);
    add(&mut plan, 1, 2, (2, 4), &[0]);
    assert_eq!(message(&plan), (Law::Deadlock, "t0, t1 wait for each other".into()));
}

#[test]
fn a_cycle_may_need_rendezvous() {
    // r0 sends t0, then t1 once t0 is gone; r1 takes t1 first. A buffered t0 would let t1 through.
    let mut plan = empty_plan("f32[4]@A{x:1}(_)", "f32[4]@B{x:2}(x)");
    add(&mut plan, 0, 1, (0, 2), &[]);
    add(&mut plan, 0, 2, (2, 4), &[]);
    let mut program = lower(&plan);
    let wait_for = |program: &mut Program, rank: usize, op: usize, dep: u32| {
        let rank = &mut program.ranks[rank];
        rank.deps.push(Dep { op: dep, kind: DepKind::Done });
        let end = rank.deps.len() as u32;
        rank.ops[op].deps = end - 1..end;
    };
    wait_for(&mut program, 0, 1, 0);
    assert!(verify_program(&program).is_ok());
    // r2 tells r1 that t1 has come, and only then does r1 take t0.
    let token = |kind| crate::program::Op { kind, tensor: 0, region: RegionId(0), bytes: 0, deps: 0..0 };
    let lane = 2;
    let send = OpKind::Send { to: Rank(1), lane, tag: 2, weight: 1, from: TileId::NOWHERE };
    let recv = OpKind::Recv { from: Rank(2), lane, tag: 2, into: TileId::NOWHERE, reduce: false };
    program.ranks[2].ops.push(token(send));
    program.ranks[1].ops.push(token(recv));
    wait_for(&mut program, 2, 1, 0);
    wait_for(&mut program, 1, 0, 1);
    let error = verify_program(&program).unwrap_err();
    assert!(matches!(error, VerifyError::Cycle { buffered: false, .. }), "{error}");
}

#[test]
fn malformed_transfers_are_refused() {
    let whole = || empty_plan("f32[4]@A{x:1}(_)", "f32[4]@B{x:1}(_)");
    let mut plan = whole();
    add(&mut plan, 0, 0, (0, 4), &[]);
    assert!(matches!(verify(&plan), Err(VerifyError::SelfTransfer { .. })));
    let mut plan = whole();
    add(&mut plan, 0, 1, (2, 2), &[]);
    assert!(matches!(verify(&plan), Err(VerifyError::EmptyBox { .. })));
    let mut plan = whole();
    add(&mut plan, 0, 1, (2, 5), &[]);
    assert!(matches!(verify(&plan), Err(VerifyError::OutsideTensor { .. })));
    let mut plan = whole();
    add(&mut plan, 0, 7, (0, 4), &[]);
    assert!(matches!(verify(&plan), Err(VerifyError::NoSuchRank { .. })));
    let mut plan = whole();
    add(&mut plan, 0, 1, (0, 4), &[9]);
    assert!(matches!(verify(&plan), Err(VerifyError::NoSuchTransfer { .. })));
    let mut plan = whole();
    let id = add(&mut plan, 0, 1, (0, 4), &[]);
    plan.transfer_mut(id).bytes = 12;
    assert!(matches!(verify(&plan), Err(VerifyError::SizeDiffers { stated: 12, bytes: 16, .. })));
    let mut plan = whole();
    let id = add(&mut plan, 0, 1, (0, 4), &[]);
    plan.transfer_mut(id).reduce = true;
    assert!(matches!(verify(&plan), Err(VerifyError::CombinesWhole { .. })));
}

#[test]
fn messages_match_at_both_ends() {
    let good = lower(&chain());
    assert!(verify_program(&good).is_ok());
    let law = |change: &dyn Fn(&mut Program)| {
        let mut program = good.clone();
        change(&mut program);
        verify_program(&program).unwrap_err()
    };
    assert!(matches!(
        law(&|p| p.ranks[2].ops.clear()),
        VerifyError::Messages(MatchError::Unmatched { tag: 1, .. })
    ));
    assert!(matches!(
        law(&|p| p.ranks[0].ops.clear()),
        VerifyError::Messages(MatchError::Unmatched { tag: 0, .. })
    ));
    let twice = |p: &mut Program| p.ranks[2].ops.extend_from_within(..);
    assert!(matches!(law(&twice), VerifyError::Messages(MatchError::NotOnce { tag: 1, .. })));
    assert!(matches!(law(&|p| p.ranks[2].ops[0].bytes = 1), VerifyError::BytesDiffer { stated: 1, .. }));
    assert!(matches!(law(&|p| p.ranks[2].ops[0].tensor = 1), VerifyError::NoSuch { what: "tensor", .. }));
    let elsewhere = |p: &mut Program| match &mut p.ranks[2].ops[0].kind {
        OpKind::Recv { from, .. } => *from = Rank(0),
        _ => unreachable!(),
    };
    assert!(matches!(law(&elsewhere), VerifyError::Messages(MatchError::EndsDiffer { what: "peers", .. })));
    assert!(matches!(law(&|p| p.ranks[1].deps[0].op = 9), VerifyError::BadDependency { dep: 9, .. }));
    for error in [law(&twice), law(&elsewhere)] {
        assert_eq!(error.law(), Law::Matched);
    }
}

#[test]
fn both_ends_of_a_channel_agree_on_the_order() {
    let mut plan = empty_plan("f32[4]@A{x:1}(_)", "f32[4]@B{x:1}(_)");
    add(&mut plan, 0, 1, (0, 2), &[]);
    add(&mut plan, 0, 1, (2, 4), &[]);
    let mut program = lower(&plan);
    program.ranks[1].ops.swap(0, 1);
    assert!(matches!(verify_program(&program), Err(VerifyError::Messages(MatchError::ChannelOrder { .. }))));
}

/// r1, in neither mesh's way of wanting it, passes two boxes on through one buffer.
fn relay(ordered: bool) -> Plan {
    let mut plan = empty_plan("f32[4]@A{x:2}(_)", "f32[4]@B{x:1}(_)");
    plan.problem.cluster.hosts.push(crate::cluster::Host::with_devices(1));
    plan.problem.topology = crate::cluster::Topology::new(&plan.problem.cluster);
    add(&mut plan, 0, 3, (0, 2), &[]);
    add(&mut plan, 3, 2, (0, 2), &[0]);
    add(&mut plan, 1, 3, (2, 4), if ordered { &[1] } else { &[] });
    add(&mut plan, 3, 2, (2, 4), &[2]);
    plan
}

#[test]
fn memory_has_one_user_at_a_time() {
    assert_eq!(verify(&relay(false)).unwrap().peak_extra_bytes, 16);
    assert_eq!(verify(&relay(true)).unwrap().peak_extra_bytes, 8);
    let claims = Claims { peak_extra_bytes: Some(8), ..Claims::default() };
    assert!(verify_claims(&relay(true), &claims).is_ok());
    let error = verify_claims(&relay(false), &claims).unwrap_err();
    assert_eq!(error, VerifyError::OverClaim { rank: Rank(3), needed: 16, claimed: 8 });

    let mut program = lower(&relay(true));
    program.ranks[3].ops[2].deps = 0..0;
    let error = verify_program(&program).unwrap_err();
    assert_eq!(
        error.to_string().lines().next().unwrap(),
        "the receive of t2 on r3 from r1 writes [0:2] while the send of t1 from r3 to r2 may still read it"
    );
    assert_eq!(error.law(), Law::Race);
    let mut program = lower(&relay(true));
    program.ranks[3].buffers[0].bytes = 4;
    assert!(matches!(verify_program(&program), Err(VerifyError::TileBeyondBuffer { bytes: 4, .. })));
}

/// Parts of a sum on r0, r1 and r2, wanted on r3.
fn sum_plan(transfers: &[(u32, u32, &[u32])]) -> Plan {
    let mut plan = empty_plan("f32[4]@A{x:3}(_ | sum x)", "f32[4]@B{x:1}(_)");
    for (src, dst, after) in transfers {
        let id = add(&mut plan, *src, *dst, (0, 4), after);
        plan.transfer_mut(id).reduce = true;
    }
    plan
}

#[test]
fn every_part_of_a_sum_counts_once() {
    assert!(verify(&sum_plan(&[(0, 1, &[]), (1, 2, &[0]), (2, 3, &[1])])).is_ok());
    assert!(verify(&sum_plan(&[(0, 3, &[]), (1, 3, &[]), (2, 3, &[])])).is_ok());
    let missing = verify(&sum_plan(&[(0, 3, &[]), (2, 3, &[])])).unwrap_err();
    assert!(matches!(missing, VerifyError::MissingPart { rank: Rank(3), contribution: 1, .. }));
    let twice = verify(&sum_plan(&[(0, 1, &[]), (1, 3, &[0]), (0, 3, &[]), (2, 3, &[])])).unwrap_err();
    assert!(matches!(twice, VerifyError::PartTwice { contribution: 0, .. }));
    assert_eq!((missing.law(), twice.law()), (Law::Coverage, Law::Coverage));
}

#[test]
fn a_sum_is_sent_whole_and_left_alone_meanwhile() {
    // What arrives in one box does so in list order: to wait for the last is to wait for all.
    assert!(verify(&sum_plan(&[(0, 2, &[]), (1, 2, &[]), (2, 3, &[1])])).is_ok());
    let unfinished = verify(&sum_plan(&[(0, 2, &[]), (1, 2, &[]), (2, 3, &[0])])).unwrap_err();
    assert!(matches!(unfinished, VerifyError::ReadRace { .. }), "{unfinished}");
    // t2 adds to r1's sum while t1 may still be sending it.
    let race = verify(&sum_plan(&[(0, 1, &[]), (1, 3, &[0]), (2, 1, &[])])).unwrap_err();
    assert_eq!(
        race.to_string().lines().next().unwrap(),
        "the copy of t2, op 4 of r1, writes [0:4] while the send of t1 from r1 to r3 may still read it"
    );
    assert_eq!(race.law(), Law::Race);
}

#[test]
fn all_may_get_the_sum_back() {
    // Around the ring to r2, then back to r0 and r1, over what they had added up before.
    let mut plan = empty_plan("f32[4]@A{x:3}(_ | sum x)", "f32[4]@A{x:3}(_)");
    for (src, dst, after, reduce) in
        [(0, 1, &[][..], true), (1, 2, &[0], true), (2, 0, &[1], false), (0, 1, &[2], false)]
    {
        let id = add(&mut plan, src, dst, (0, 4), after);
        plan.transfer_mut(id).reduce = reduce;
    }
    assert_eq!(verify(&plan).unwrap().peak_extra_bytes, 0);
}

#[test]
fn transfers_can_be_named_as_a_document_names_them() {
    let mut plan = empty_plan("f32[4]@A{x:2}(x)", "f32[4]@B{x:1}(_)");
    add(&mut plan, 0, 2, (0, 2), &[1]);
    add(&mut plan, 1, 2, (2, 4), &[0]);
    let error = verify(&plan).unwrap_err().renumbered(|t| TransferId(t.0 * 10));
    assert_eq!(error.to_string(), "t0, t10 wait for each other");
}
