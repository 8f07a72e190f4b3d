//! Lists by hand and at random.

use proptest::prelude::*;

use super::*;

const ONE: GroupIndex = GroupIndex(0);

fn call(ns: u64) -> Call {
    Call { group: ONE, kind: CallKind::AllReduce, bytes: ns, ns, program: 0 }
}

/// So many times: compute, then a call whose result the next of them reads.
fn chain(times: usize, compute_ns: u64, call_ns: u64) -> List {
    let mut list = List::default();
    for _ in 0..times {
        list.compute(compute_ns);
        let started = list.start(call(call_ns));
        list.wait(started);
    }
    list
}

fn alone(list: &List) -> Ran {
    run(&[list], &[vec![0]]).unwrap()
}

#[test]
fn who_waits_stands_still() {
    let ran = alone(&chain(3, 10, 4));
    assert_eq!(ran.ranks, [RankTimes { compute_ns: 30, exposed_ns: 12, end_ns: 42 }]);
    assert_eq!(ran.calls, [[(10, 14), (24, 28), (38, 42)]]);
    // Where somebody waits later, the call is beside what is computed.
    let mut list = List::default();
    list.compute(10);
    let started = list.start(call(4));
    list.compute(10);
    list.wait(started);
    assert_eq!(alone(&list).ranks, [RankTimes { compute_ns: 20, exposed_ns: 0, end_ns: 20 }]);
}

/// A call begins when the last of its members has started it.
#[test]
fn a_slow_member_keeps_its_group_waiting() {
    let lists = [chain(2, 10, 4), chain(2, 25, 4)];
    let ran = run(&[&lists[0], &lists[1]], &[vec![0, 1]]).unwrap();
    assert_eq!(ran.ranks[0], RankTimes { compute_ns: 20, exposed_ns: 38, end_ns: 58 });
    assert_eq!(ran.ranks[1], RankTimes { compute_ns: 50, exposed_ns: 8, end_ns: 58 });
}

#[test]
fn another_order_is_an_error_that_says_where() {
    let list = |calls: &[(CallKind, u64)]| {
        let mut list = List::default();
        for &(kind, bytes) in calls {
            let started = list.start(Call { group: ONE, kind, bytes, ns: 1, program: 0 });
            list.wait(started);
        }
        list
    };
    use CallKind::{AllGather, AllReduce};
    let a = list(&[(AllReduce, 8), (AllGather, 16), (AllReduce, 8)]);
    let b = list(&[(AllReduce, 8), (AllReduce, 8), (AllGather, 16)]);
    let short = list(&[(AllReduce, 8)]);
    let members = vec![vec![0, 1]];
    assert_eq!(check_order(&[&a, &a], &members), Ok(()));
    let error = check_order(&[&a, &b], &members).unwrap_err().to_string();
    let wanted = "members 0 and 1 of group 0 start different calls at place 1: AllGather of 16 B and AllReduce of 8 B\nhint: ";
    assert!(error.starts_with(wanted), "{error}");
    let error = run(&[&a, &short], &members).unwrap_err().to_string();
    assert!(error.contains("at place 1: AllGather of 16 B and none"), "{error}");
    let error = check_order(&[&a, &a], &[vec![0]]).unwrap_err();
    assert_eq!(error, ListError::Stranger { rank: 1, group: ONE });
    // In groups that have nothing to do with each other, orders may differ.
    let other = List { calls: b.calls.iter().map(|c| Call { group: GroupIndex(1), ..*c }).collect(), ..b };
    assert_eq!(check_order(&[&a, &other], &[vec![0], vec![1]]), Ok(()));
}

/// Two groups of two ranks, each in one order; and the ranks wait for each other all the same.
#[test]
fn groups_that_wait_for_each_other_are_an_error() {
    let list = |order: [u32; 2]| {
        let mut list = List::default();
        for group in order {
            let started = list.start(Call { group: GroupIndex(group), ..call(1) });
            list.wait(started);
        }
        list
    };
    let (a, b) = (list([0, 1]), list([1, 0]));
    let groups = [vec![0, 1], vec![0, 1]];
    assert!(run(&[&a, &a], &groups).is_ok());
    assert_eq!(run(&[&a, &b], &groups), Err(ListError::Blocked { rank: 0, group: ONE }));
}

/// Two chains alike, whose calls take as long as what is computed: each hides the other's but for the first and the last.
#[test]
fn two_lists_hide_each_others_calls() {
    let (a, b) = (chain(8, 10, 10), chain(8, 10, 10));
    let order = Order::of(&[&a, &b]);
    let ran = alone(&order.applied_to(&[&a, &b]));
    assert_eq!(ran.ranks, [RankTimes { compute_ns: 160, exposed_ns: 10, end_ns: 170 }]);
    let one_by_one = alone(&Order::one_by_one(&[&a, &b]).applied_to(&[&a, &b]));
    assert_eq!(one_by_one.ranks, [RankTimes { compute_ns: 160, exposed_ns: 160, end_ns: 320 }]);
    assert_eq!(one_by_one, alone(&a.clone().then(&b)));
}

/// What waits for nothing is done while others wait, and what is left of it at the end.
#[test]
fn fillers_fill() {
    let a = chain(4, 10, 10);
    let mut filler = List::default();
    (0..60).for_each(|_| filler.compute(1));
    let ran = alone(&Order::of(&[&a, &filler]).applied_to(&[&a, &filler]));
    assert_eq!(ran.ranks, [RankTimes { compute_ns: 100, exposed_ns: 0, end_ns: 100 }]);
}

fn any_list() -> impl Strategy<Value = List> {
    prop::collection::vec((0u64..30, 0u64..20, 0usize..3, any::<bool>()), 0..12).prop_map(|steps| {
        let (mut list, mut open) = (List::default(), vec![]);
        for (compute, ns, close, gather) in steps {
            list.compute(compute);
            let kind = if gather { CallKind::AllGather } else { CallKind::AllReduce };
            open.push(list.start(Call { group: ONE, kind, bytes: ns, ns, program: 0 }));
            for _ in 0..close.min(open.len()) {
                list.wait(open.remove(0));
            }
        }
        list.settle();
        list
    })
}

proptest! {
    /// Whatever becomes one has all that it was made of, each in its order, on every member alike; nothing is faster than what it computes, than what it sends, or than
    /// its longest part; and nothing is slower than one behind the other.
    #[test]
    fn merged_lists_are_within_their_bounds(lists in prop::collection::vec(any_list(), 1..4), slower in 1u64..4) {
        let lists: Vec<&List> = lists.iter().collect();
        let order = Order::of(&lists);
        let merged = order.applied_to(&lists);
        prop_assert!(merged.is_settled());
        let ran = alone(&merged);
        let sum = |of: &dyn Fn(&List) -> u64| lists.iter().map(|list| of(list)).sum::<u64>();
        prop_assert_eq!(ran.ranks[0].compute_ns, sum(&|l| l.compute_ns()));
        prop_assert_eq!(merged.comm_ns(), sum(&|l| l.comm_ns()));
        let ends: Vec<u64> = lists.iter().map(|list| alone(list).end_ns()).collect();
        let least = ends.iter().copied().max().unwrap().max(merged.compute_ns()).max(merged.comm_ns());
        prop_assert!(ran.end_ns() >= least, "{} for {least}", ran.end_ns());
        prop_assert!(ran.end_ns() <= ends.iter().sum::<u64>(), "{} for {ends:?}", ran.end_ns());
        // A member that takes longer for everything, in the same order.
        let slow: Vec<List> = lists.iter().map(|list| {
            let items = list.items.iter().map(|item| match *item {
                Item::Compute { ns } => Item::Compute { ns: slower * ns },
                other => other,
            });
            List { items: items.collect(), ..(*list).clone() }
        }).collect();
        let slow: Vec<&List> = slow.iter().collect();
        let other = order.applied_to(&slow);
        let together = run(&[&merged, &other], &[vec![0, 1]]).unwrap();
        prop_assert!(together.end_ns() >= ran.end_ns());
        prop_assert_eq!(together.ranks[1].compute_ns, slower * together.ranks[0].compute_ns);
    }
}
