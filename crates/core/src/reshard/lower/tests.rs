//! Lowered plans, small enough to read.

use super::*;
use crate::id::{RegionId, TransferId};
use crate::program::{DepKind, Op, OpKind, Role, TileId};
use crate::region::{Region, Span};
use crate::reshard::Problem;

fn problem(src: &str, dst: &str) -> Plan {
    let problem = Problem::pair(src.parse().unwrap(), dst.parse().unwrap()).unwrap();
    let mut plan = Plan::new(problem, "by hand", 1);
    let shape = plan.problem.reshards[0].src.layout.shape().to_vec();
    plan.add_region(Region::whole(&shape));
    plan
}

/// Adds a transfer of the whole tensor.
fn whole(plan: &mut Plan, src: u32, dst: u32, after: &[u32]) {
    let after: Vec<TransferId> = after.iter().copied().map(TransferId).collect();
    plan.add(0, Rank(src), Rank(dst), RegionId(0), &after);
}

/// A rank's ops, one a line: what it does, then what it waits for (`~` to stream).
fn show(program: &Program, rank: usize) -> Vec<String> {
    let rank = &program.ranks[rank];
    let staging = |b: u32| rank.buffers[..b as usize].iter().filter(|b| b.role == Role::Staging).count();
    let buffer = |tile: TileId| match tile {
        TileId::NOWHERE => "word".to_string(),
        tile => match rank.buffers[rank.tile(tile).buffer as usize].role {
            Role::Source(_) => "src".into(),
            Role::Destination(_) => "dst".into(),
            Role::Staging => format!("#{}", staging(rank.tile(tile).buffer)),
            other => format!("{other:?}"),
        },
    };
    let line = |op: &Op| {
        let mut line = match op.kind {
            OpKind::Send { to, tag, from, .. } => format!("{} -> t{tag} {to}", buffer(from)),
            OpKind::Recv { from, tag, into, reduce, .. } => {
                format!("{from} t{tag} {} {}", if reduce { "+>" } else { "->" }, buffer(into))
            }
            OpKind::Copy { from, into, reduce } => {
                format!("{} {} {}", buffer(from), if reduce { "+=>" } else { "=>" }, buffer(into))
            }
            OpKind::Compute { pass, .. } => format!("pass {pass}"),
        };
        for dep in rank.deps(op) {
            line += &format!(" {}{}", if dep.kind == DepKind::Stream { "~" } else { "" }, dep.op);
        }
        line
    };
    rank.ops.iter().map(line).collect()
}

#[test]
fn forwarding_streams() {
    let mut plan = problem("f32[4]@A{x:1}(_)", "f32[4]@B{x:2}(_)");
    whole(&mut plan, 0, 1, &[]);
    whole(&mut plan, 1, 2, &[0]);
    let program = lower(&plan);
    assert_eq!(show(&program, 0), ["src -> t0 r1"]);
    assert_eq!(show(&program, 1), ["r0 t0 -> dst", "dst -> t1 r2 ~0"]);
    assert_eq!(show(&program, 2), ["r1 t1 -> dst"]);
}

#[test]
fn a_token_carries_order_between_strangers() {
    let mut plan = problem("f32[4]@A{x:2}(_)", "f32[4]@B{x:2}(_)");
    whole(&mut plan, 0, 2, &[]);
    whole(&mut plan, 1, 3, &[0]);
    let program = lower(&plan);
    assert_eq!(show(&program, 2), ["r0 t0 -> dst", "word -> t2 r1 0"]);
    assert_eq!(show(&program, 1), ["r2 t2 -> word", "src -> t1 r3 0"]);
}

#[test]
fn what_stays_is_copied_and_what_passes_through_is_staged() {
    let mut plan = problem("f32[4]@A{x:2}(x)", "f32[4]@B{x:2}=2,0(x)");
    let first = plan.add_region(Region::new(vec![Span::new(0, 2)]));
    let t0 = plan.add(0, Rank(0), Rank(1), first, &[]);
    plan.add(0, Rank(1), Rank(2), first, &[t0]);
    let program = lower(&plan);
    assert_eq!(show(&program, 1), ["r0 t0 -> #0", "#0 -> t1 r2 ~0"]);
    assert_eq!(program.ranks[1].extra_bytes(), 8);

    let plan = problem("f32[4]@A{x:2}(x)", "f32[4]@B{x:1}=0(_)");
    let program = lower(&plan);
    assert_eq!(show(&program, 0), ["src => dst"]);
    assert_eq!(program.boxes[program.ranks[0].ops[0].region].to_string(), "[0:2]");
}

#[test]
fn memory_is_handed_on_only_where_the_plan_says_so() {
    let build = |ordered: bool| {
        let mut plan = problem("f32[4]@A{x:2}(_)", "f32[4]@B{x:1}(x)");
        let halves = [(0, 2), (2, 4)].map(|(a, b)| plan.add_region(Region::new(vec![Span::new(a, b)])));
        // A rank of neither mesh passes both halves on.
        plan.problem.cluster.hosts.push(crate::cluster::Host::with_devices(1));
        plan.problem.topology = crate::cluster::Topology::new(&plan.problem.cluster);
        let t0 = plan.add(0, Rank(0), Rank(3), halves[0], &[]);
        let t1 = plan.add(0, Rank(3), Rank(2), halves[0], &[t0]);
        let order: &[TransferId] = &[t1];
        let t2 = plan.add(0, Rank(1), Rank(3), halves[1], if ordered { order } else { &[] });
        plan.add(0, Rank(3), Rank(2), halves[1], &[t2]);
        lower(&plan)
    };
    assert_eq!(build(false).ranks[3].extra_bytes(), 16);
    let program = build(true);
    assert_eq!(program.ranks[3].extra_bytes(), 8);
    assert_eq!(show(&program, 3), ["r0 t0 -> #0", "#0 -> t1 r2 ~0", "r1 t2 -> #0 1", "#0 -> t3 r2 ~2"]);
}

#[test]
fn partial_sums_add_up_where_they_meet() {
    let mut plan = problem("f32[4]@A{x:3}(_ | sum x)", "f32[4]@B{x:1}(_)");
    whole(&mut plan, 0, 2, &[]);
    whole(&mut plan, 1, 2, &[]);
    whole(&mut plan, 2, 3, &[0, 1]);
    for i in 0..3 {
        plan.transfer_mut(TransferId(i)).reduce = true;
    }
    let program = lower(&plan);
    assert_eq!(show(&program, 1), ["src -> t1 r2"]);
    assert_eq!(
        show(&program, 2),
        ["src => #0", "r0 t0 +> #0 0", "r1 t1 -> #1", "#1 +=> #0 1 2", "#0 -> t2 r3 1 3"]
    );
    assert_eq!(show(&program, 3), ["r2 t2 -> dst"]);
}

#[test]
fn a_large_part_of_a_sum_waits_for_its_turn() {
    let mut plan = problem("f32[32768]@A{x:3}(_ | sum x)", "f32[32768]@A{x:3}(_)");
    whole(&mut plan, 0, 2, &[]);
    whole(&mut plan, 1, 2, &[]);
    whole(&mut plan, 2, 0, &[0, 1]);
    plan.transfer_mut(TransferId(1)).reduce = true;
    plan.transfer_mut(TransferId(1)).then_own = true;
    let program = lower(&plan);
    assert_eq!(show(&program, 2), ["r0 t0 -> dst", "r1 t1 +> dst 0", "src +=> dst 1", "dst -> t2 r0 0 2"]);
}

#[test]
fn a_box_in_several_buffers_is_put_together_first() {
    let mut plan = problem("f32[4]@A{x:2}(x)", "f32[4]@B{x:1}(_)");
    let first = plan.add_region(Region::new(vec![Span::new(0, 2)]));
    let t0 = plan.add(0, Rank(0), Rank(1), first, &[]);
    whole(&mut plan, 1, 2, &[t0.0]);
    let program = lower(&plan);
    assert_eq!(show(&program, 1), ["r0 t0 -> #0", "src => #1", "#0 => #1 0", "#1 -> t1 r2 1 2 0"]);
}

#[test]
fn what_is_named_is_what_is_sent() {
    // r1 wants the first half, and passes it on out of a box that only came through.
    let mut plan = problem("u8[4]@A{x:1}(_)", "u8[4]@B{y:2,x:2}(x)");
    let half = plan.add_region(Region::new(vec![Span::new(0, 2)]));
    whole(&mut plan, 0, 1, &[]);
    plan.add(0, Rank(1), Rank(3), half, &[TransferId(0)]);
    plan.add(0, Rank(0), Rank(1), half, &[]);
    let program = lower(&plan);
    assert_eq!(show(&program, 1), ["r0 t0 -> #0", "#0 -> t1 r3 0", "r0 t2 -> dst"]);
}

#[test]
fn one_rank_is_lowered_like_all_of_them() {
    let mut plan = problem("f32[4]@A{x:3}(_ | sum x)", "f32[4]@B{x:2}(_)");
    whole(&mut plan, 0, 2, &[]);
    whole(&mut plan, 1, 2, &[]);
    whole(&mut plan, 2, 3, &[0, 1]);
    whole(&mut plan, 3, 4, &[2]);
    plan.add(0, Rank(0), Rank(1), RegionId(0), &[TransferId(3)]);
    for i in 0..3 {
        plan.transfer_mut(TransferId(i)).reduce = true;
    }
    // Once a plan was lowered it knows who touches what; as it was read it does not.
    let as_read = plan.clone();
    let program = lower(&plan);
    assert!(plan.known_touching().is_some() && as_read.known_touching().is_none());
    for rank in 0..5 {
        let alone = project(&plan, Rank::at(rank), Addressing::Apart);
        assert_eq!(alone, project(&as_read, Rank::at(rank), Addressing::Apart));
        assert_eq!(show(&alone, rank), show(&program, rank));
        assert_eq!(alone.ranks[rank].buffers, program.ranks[rank].buffers);
    }
}
