//! Ranks that can only post and stand still: whatever the plan, nobody stands still for ever, and every element arrives.
//!
//! The oracle is slow and obvious: ranks take turns by a seed, a piece moves once both its ends have been posted and not before, and its bytes are read at any time
//! up to then. By order, in addition, nothing moves between two ranks but the first thing that either has posted for the other.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crossmesh_core::id::Rank;
use crossmesh_core::program::posting::{Matching, Post, Posting};
use crossmesh_core::program::{DepKind, Holds, Op, OpKind, Program, Tile};
use crossmesh_core::reshard::lower::{Addressing, posting, project};
use crossmesh_core::reshard::{Plan, PlanOptions, Strategy, lower, plan};
use crossmesh_testkit::boxes;
use crossmesh_testkit::replay::elements;
use crossmesh_testkit::seed::{Seed, Shape, partial_destination, problem};
use crossmesh_testkit::simple::{self, Delivery};
use crossmesh_testkit::sweep;

/// An element of a tensor, and how it was added up: the parts in it, and what was added to what.
#[derive(Debug, Clone, PartialEq)]
struct Value {
    element: Vec<u64>,
    parts: Vec<u32>,
    sum: u64,
}

type Place = (u32, u64);
/// Of a piece: sender, receiver, tag.
type Key = (usize, usize, u32);
type Row = Vec<Option<Value>>;
type Outcome = BTreeMap<(usize, usize, Vec<u64>), u64>;

/// One rank: what it is to post, and how far it has come.
struct Member<'a> {
    program: &'a Program,
    posts: Vec<Post>,
    next: usize,
    /// By buffer and byte.
    memory: HashMap<Place, Value>,
    /// By op: what it sends, or has received; which of its pieces are over; whether it was put where it belongs.
    rows: Vec<Row>,
    over: Vec<BTreeSet<u32>>,
    unpacked: Vec<bool>,
    rank: usize,
    piece_elements: Box<dyn Fn(&Op) -> usize + 'a>,
}

impl<'a> Member<'a> {
    fn new(program: &'a Program, rank: usize, posts: Vec<Post>, matching: Matching) -> Self {
        let ranked = &program.ranks[rank];
        let ops = ranked.ops.len();
        let width = |tensor: u32| program.tensors[tensor as usize].dtype.bytes();
        let piece_elements = move |op: &Op| match matching {
            Matching::ByTag { piece_bytes } => (piece_bytes / width(op.tensor)) as usize,
            Matching::ByOrder => usize::MAX,
        };
        let mut member = Self {
            program,
            posts,
            next: 0,
            memory: HashMap::new(),
            rows: vec![vec![]; ops],
            over: vec![BTreeSet::new(); ops],
            unpacked: vec![false; ops],
            rank,
            piece_elements: Box::new(piece_elements),
        };
        for tile in &ranked.tiles {
            let Holds::Source(part) = tile.holds else { continue };
            for element in elements(&program.boxes[tile.region]) {
                let sum = 0x5851_f42d_4c95_7f2d ^ u64::from(part);
                let value = Value { element: element.clone(), parts: vec![part], sum };
                member.memory.insert(member.place(tile, &element), value);
            }
        }
        member
    }

    fn op(&self, op: u32) -> &'a Op {
        &self.program.ranks[self.rank].ops[op as usize]
    }

    fn place(&self, tile: &Tile, element: &[u64]) -> Place {
        let mut stride = self.program.tensors[tile.tensor as usize].dtype.bytes();
        let mut at = tile.offset;
        for dim in (0..element.len()).rev() {
            let span = self.program.boxes[tile.region].spans()[dim];
            at += (element[dim] - span.start) * tile.strides.as_ref().map_or(stride, |s| s[dim]);
            stride *= span.len();
        }
        (tile.buffer, at)
    }

    fn elements(&self, op: &Op) -> Vec<Vec<u64>> {
        if op.bytes == 0 { vec![] } else { elements(&self.program.boxes[op.region]) }
    }

    fn row(&self, op: &Op) -> Row {
        let (Some(from), _) = op.ends() else { return vec![] };
        let tile = self.program.ranks[self.rank].tile(from);
        self.elements(op).iter().map(|e| self.memory.get(&self.place(tile, e)).cloned()).collect()
    }

    fn put(&mut self, op: &Op, row: Row, reduce: bool) {
        let (_, Some(into)) = op.ends() else { return };
        let tile = self.program.ranks[self.rank].tile(into);
        for (element, value) in self.elements(op).iter().zip(row) {
            let (place, mut value) = (self.place(tile, element), value.expect("what was received was held"));
            if reduce {
                let held = &self.memory[&place];
                assert_eq!(held.element, value.element);
                value.parts.extend(&held.parts);
                value.sum ^= held.sum.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17);
            }
            self.memory.insert(place, value);
        }
    }

    fn num_pieces(&self, op: &Op) -> u32 {
        let elements = self.elements(op).len();
        (elements.div_ceil((self.piece_elements)(op)) as u32).max(1)
    }

    /// Has waited for pieces of an op: of a receive, it is put where it belongs when all have been.
    fn waited(&mut self, number: u32, count: u32) {
        let op = self.op(number);
        let OpKind::Recv { reduce, .. } = op.kind else { return };
        if count == self.num_pieces(op) && !std::mem::replace(&mut self.unpacked[number as usize], true) {
            let row = std::mem::take(&mut self.rows[number as usize]);
            self.put(op, row.clone(), reduce);
            self.rows[number as usize] = row;
        }
    }

    /// The receive that an op passes on.
    fn followed(&self, op: &Op) -> Option<u32> {
        let mut deps =
            self.program.ranks[self.rank].deps(op).iter().filter(|dep| dep.kind == DepKind::Stream);
        deps.find(|dep| matches!(self.op(dep.op).kind, OpKind::Recv { reduce: false, .. })).map(|dep| dep.op)
    }

    /// Takes one step, if it need not stand still for it; what it has posted.
    fn step(&mut self) -> Option<Post> {
        let post = self.posts.get(self.next)?.clone();
        let is_over =
            |(on, count): &(u32, u32)| (0..*count).all(|piece| self.over[*on as usize].contains(&piece));
        if !post.waits.iter().all(is_over) {
            return None;
        }
        for (on, count) in &post.waits {
            self.waited(*on, *count);
        }
        self.next += 1;
        let op = self.op(post.op);
        match op.kind {
            OpKind::Copy { reduce, .. } => {
                let row = self.row(op);
                self.put(op, row, reduce);
                self.over[post.op as usize].insert(0);
            }
            OpKind::Send { .. } if post.piece == 0 => {
                // As it arrives, what is passed on lies in the row that it arrives in.
                let follows = self.num_pieces(op) > 1
                    && self.followed(op).is_some_and(|on| post.waits.contains(&(on, 1)));
                self.rows[post.op as usize] = if follows { vec![] } else { self.row(op) };
            }
            OpKind::Recv { .. } => self.rows[post.op as usize] = vec![None; self.elements(op).len()],
            _ => {}
        }
        Some(post)
    }

    /// The bytes of a piece that is sent.
    fn piece(&self, post: &Post) -> Row {
        let op = self.op(post.op);
        let mut row = &self.rows[post.op as usize];
        if row.is_empty() && op.bytes > 0 {
            row = &self.rows[self.followed(op).expect("it follows something") as usize];
        }
        row[self.range(op, post.piece, row.len())].to_vec()
    }

    fn range(&self, op: &Op, piece: u32, len: usize) -> std::ops::Range<usize> {
        let step = (self.piece_elements)(op);
        let start = step.saturating_mul(piece as usize).min(len);
        start..start.saturating_add(step).min(len)
    }

    fn arrived(&mut self, post: &Post, piece: u32, values: Row) {
        let op = self.op(post.op);
        let len = self.rows[post.op as usize].len();
        let range = self.range(op, piece, len);
        self.rows[post.op as usize][range].clone_from_slice(&values);
    }

    fn outcome(&mut self, outcome: &mut Outcome) {
        for op in 0..self.over.len() as u32 {
            self.waited(op, self.over[op as usize].len() as u32);
        }
        for (i, tile) in self.program.ranks[self.rank].tiles.iter().enumerate() {
            if tile.holds != Holds::Goal {
                continue;
            }
            let count = self.program.tensors[tile.tensor as usize].partial.map_or(1, |p| p.count);
            for element in elements(&self.program.boxes[tile.region]) {
                let value = self.memory.get(&self.place(tile, &element)).expect("there is something");
                let mut parts = value.parts.clone();
                parts.sort_unstable();
                assert_eq!(value.element, element);
                assert_eq!(parts, (0..count).collect::<Vec<_>>(), "r{} {element:?}", self.rank);
                outcome.insert((self.rank, i, element), value.sum);
            }
        }
    }
}

/// What two ranks have posted for each other and has not moved: sender, receiver, tag; both ends, of a send with what was read early.
#[derive(Default)]
struct Wire {
    sends: BTreeMap<Key, (Post, Option<Row>)>,
    recvs: BTreeMap<Key, (Post, u32)>,
    /// By order: for each pair, what it has posted for the other, in order.
    posted: BTreeMap<(usize, usize), Vec<Key>>,
}

impl Wire {
    fn post(&mut self, member: &Member<'_>, post: &Post, early: bool) {
        let me = member.rank;
        let mut row =
            |here: usize, there: Rank, key| self.posted.entry((here, there.index())).or_default().push(key);
        match member.op(post.op).kind {
            OpKind::Send { to, .. } => {
                let key = (me, to.index(), post.tag);
                row(me, to, key);
                let read = early.then(|| member.piece(post));
                assert!(self.sends.insert(key, (post.clone(), read)).is_none(), "{key:?} is sent twice");
            }
            OpKind::Recv { from, .. } => {
                for piece in 0..member.num_pieces(member.op(post.op)) {
                    let key = (from.index(), me, post.tag + piece);
                    row(me, from, key);
                    assert!(
                        self.recvs.insert(key, (post.clone(), piece)).is_none(),
                        "{key:?} is received twice"
                    );
                }
            }
            _ => {}
        }
    }

    /// What can move now.
    fn ready(&self, matching: Matching) -> Vec<Key> {
        let both = self.sends.keys().filter(|key| self.recvs.contains_key(key)).copied();
        let first = |at: (usize, usize)| self.posted.get(&at).and_then(|row| row.first());
        both.filter(|key| {
            let (src, dst, _) = *key;
            matching != Matching::ByOrder
                || (first((src, dst)) == Some(key) && first((dst, src)) == Some(key))
        })
        .collect()
    }

    fn moves(&mut self, key: Key, members: &mut [Member<'_>]) {
        let ((send, early), (recv, piece)) =
            (self.sends.remove(&key).unwrap(), self.recvs.remove(&key).unwrap());
        let values = early.unwrap_or_else(|| members[key.0].piece(&send));
        members[key.1].arrived(&recv, piece, values);
        members[key.0].over[send.op as usize].insert(send.piece);
        members[key.1].over[recv.op as usize].insert(piece);
        for at in [(key.0, key.1), (key.1, key.0)] {
            self.posted.get_mut(&at).unwrap().retain(|other| *other != key);
        }
    }
}

/// Runs a program by its posts, slowly.
fn run(program: &Program, posting: &Posting, matching: Matching, seed: u64) -> Outcome {
    let mut seed = Seed(seed);
    let member = |rank: usize| {
        let posts = posting.of_rank(&program.ranks[rank], Rank::at(rank));
        Member::new(program, rank, posts, matching)
    };
    let mut members: Vec<Member<'_>> = (0..program.ranks.len()).map(member).collect();
    let mut wire = Wire::default();
    loop {
        let ready = wire.ready(matching);
        if !ready.is_empty() && seed.one_in(2) {
            wire.moves(seed.pick(&ready), &mut members);
            continue;
        }
        let start = seed.below(members.len());
        let stepped = (0..members.len()).find_map(|i| {
            let member = &mut members[(start + i) % program.ranks.len()];
            member.step().map(|post| (member.rank, post))
        });
        match stepped {
            Some((rank, post)) => wire.post(&members[rank], &post, seed.one_in(2)),
            None if ready.is_empty() => break,
            None => {}
        }
    }
    for member in &members {
        assert_eq!(
            member.next,
            member.posts.len(),
            "r{} stands still for ever at {:?}",
            member.rank,
            member.posts.get(member.next)
        );
    }
    assert!(wire.sends.is_empty() && wire.recvs.is_empty());
    let mut outcome = Outcome::new();
    members.iter_mut().for_each(|member| member.outcome(&mut outcome));
    outcome
}

/// A plan of any strategy, with and without a limit of memory, of axes, boxes and sums.
fn planned(number: u64) -> Plan {
    let mut seed = Seed(number);
    let problem = match number % 4 {
        0 => boxes::small_problem(number),
        1 => partial_destination(number, 9),
        _ => problem(number, Shape::SMALL),
    };
    if number % 4 > 1 && seed.one_in(4) {
        return simple::plan(&problem, seed.pick(&[Delivery::Direct, Delivery::Chain, Delivery::Ordered]));
    }
    let limit = seed.one_in(3).then(|| 8 + seed.below(200) as u64);
    let strategy = seed.pick(&Strategy::CONCRETE);
    let options = PlanOptions { strategy, max_extra_bytes: limit, ..PlanOptions::default() };
    plan(&problem, &options).or_else(|_| plan(&problem, &PlanOptions::default())).unwrap()
}

const WAYS: [Matching; 4] = [
    Matching::ByTag { piece_bytes: 8 },
    Matching::ByTag { piece_bytes: 32 },
    Matching::ByTag { piece_bytes: 1 << 20 },
    Matching::ByOrder,
];

#[test]
fn nobody_stands_still_for_ever_and_every_element_arrives() {
    let mut in_pieces_behind_others = 0;
    for number in sweep::first()..sweep::first() + sweep::count(2000) as u64 {
        let plan = planned(number);
        let program = lower(&plan);
        let mut first = None;
        for matching in WAYS {
            let order = posting(&plan, matching).unwrap();
            let outcome = run(&program, &order, matching, number);
            assert_eq!(
                *first.get_or_insert_with(|| outcome.clone()),
                outcome,
                "plan {number}: a sum depends on luck"
            );
            for rank in (0..program.ranks.len()).map(Rank::at) {
                let posts = order.of_rank(&program.ranks[rank.index()], rank);
                let alone = project(&plan, rank, Addressing::Apart);
                assert_eq!(order.of_rank(&alone.ranks[rank.index()], rank), posts, "plan {number}, {rank}");
                let behind =
                    |p: &&Post| p.piece > 0 && plan.transfers().iter().any(|t| !plan.after(t).is_empty());
                in_pieces_behind_others += posts.iter().filter(behind).count();
            }
        }
    }
    assert!(in_pieces_behind_others > 100, "{in_pieces_behind_others}");
}

#[test]
fn what_is_passed_on_is_a_piece_behind_and_what_waits_is_behind_the_last() {
    let pairs = [("u8[16]@A{x:1}=0(_)", "u8[16]@B{x:2}=1-2(_)")]
        .map(|(src, dst)| ("w".into(), src.parse().unwrap(), dst.parse().unwrap()));
    let problem = crossmesh_core::reshard::Problem::new(
        pairs.into(),
        crossmesh_core::reshard::problem::Hosts::Assumed(Default::default()),
    )
    .unwrap();
    let plan = simple::plan(&problem, Delivery::Chain);
    let shown = |plan: &Plan, rank: u32| {
        let matching = Matching::ByTag { piece_bytes: 8 };
        let program = lower(plan);
        let posts = posting(plan, matching).unwrap().of_rank(&program.ranks[rank as usize], Rank(rank));
        posts.into_iter().map(|p| (p.op, p.piece, p.tag, p.waits)).collect::<Vec<_>>()
    };
    assert_eq!(shown(&plan, 0), [(0, 0, 0, vec![]), (0, 1, 1, vec![])]);
    assert_eq!(shown(&plan, 1), [(0, 0, 0, vec![]), (1, 0, 0, vec![(0, 1)]), (1, 1, 1, vec![(0, 2)])]);
    assert_eq!(shown(&plan, 2), [(0, 0, 0, vec![])]);
    let mut plan = Plan::new(problem, "by hand", 8);
    let region = plan.add_region(crossmesh_core::region::Region::whole(&[16]));
    let first = plan.add(0, Rank(0), Rank(1), region, &[]);
    plan.add(0, Rank(0), Rank(2), region, &[first]);
    assert_eq!(
        shown(&plan, 0),
        [(0, 0, 0, vec![]), (0, 1, 1, vec![]), (1, 0, 0, vec![(0, 2)]), (1, 1, 1, vec![])]
    );
}
