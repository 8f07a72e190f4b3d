//! Random layouts by boxes, by seed: chunks of any size, flat runs, ragged rows, columns of a wider buffer; replicas,
//! overlaps, holes that nobody wants, devices that hold nothing; up to 1,000 boxes a device.
//!
//! ```text
//! the tensor is cut up     |  0 |1|  2   |      boxes are dealt out, some of them to several devices,
//! by straight cuts         |----+-|------|      then others are laid across them, then each device
//!                          |  3   |  4   |      puts its own into memory: packed, with gaps, strided
//! ```

use crossmesh_core::layout::Layout;
use crossmesh_core::reshard::Problem;
use crossmesh_core::reshard::problem::{Assumed, Hosts};

use crate::seed::{MeshDraft, Seed, axis_layout};

/// A box: start and end of every dim.
type Draft = Vec<(usize, usize)>;

/// How large the tensors of box layouts are, and how finely they are cut.
#[derive(Debug, Clone, Copy)]
struct Grain {
    dims: usize,
    dim_len: usize,
    boxes: usize,
    devices: usize,
}

/// Mostly a few boxes; once in 16 times up to 1,000 on one device.
fn grain(seed: &mut Seed) -> Grain {
    match seed.below(16) {
        0 => Grain { dims: 2, dim_len: 48, boxes: 1000, devices: 2 },
        1..=3 => Grain { dims: 2, dim_len: 16, boxes: 60, devices: 4 },
        _ => Grain { dims: 3, dim_len: 7, boxes: 8, devices: 6 },
    }
}

/// Fine cuts need room.
fn dims(seed: &mut Seed, grain: Grain) -> Vec<usize> {
    match grain.boxes {
        ..100 => (0..seed.below(grain.dims + 1)).map(|_| 1 + seed.below(grain.dim_len)).collect(),
        _ => (0..grain.dims).map(|_| grain.dim_len - seed.below(8)).collect(),
    }
}

/// A tensor and two layouts of it, at least one of them by boxes. One in six is a partial sum.
pub fn problem(seed: u64) -> Problem {
    let mut seed = Seed(seed);
    let grain = grain(&mut seed);
    problem_of(seed, grain)
}

/// The same, small enough to be carried out byte by byte many times over.
pub fn small_problem(seed: u64) -> Problem {
    problem_of(Seed(seed), Grain { dims: 2, dim_len: 4, boxes: 4, devices: 3 })
}

fn problem_of(mut seed: Seed, grain: Grain) -> Problem {
    let dims = dims(&mut seed, grain);
    let dims = if seed.one_in(40) { dims.iter().map(|_| 0).collect() } else { dims };
    let dtype = seed.pick(&["f32", "bf16", "u8"]);
    let mesh_a = mesh(&mut seed, "A", grain);
    let mut mesh_b = mesh(&mut seed, "B", grain);
    match seed.below(4) {
        0 => mesh_b = mesh_a.clone(),
        1 => mesh_b.first_rank = Some(seed.below(mesh_a.len() + 1)),
        _ => {}
    }
    let (src_boxes, dst_boxes) = seed.pick(&[(true, true), (true, false), (false, true)]);
    let partial = seed.one_in(6);
    let src = match src_boxes {
        true => box_layout(&mut seed, &mesh_a, dtype, &dims, Side::Source { partial }, grain),
        false => axis_layout(&mut seed, &mesh_a, dtype, &dims, partial),
    };
    let dst = match dst_boxes {
        true => box_layout(&mut seed, &mesh_b, dtype, &dims, Side::Destination, grain),
        false => axis_layout(&mut seed, &mesh_b, dtype, &dims, false),
    };
    let per_host = seed.one_in(2).then(|| 1 + seed.below(3) as u32);
    let hosts = Hosts::Assumed(Assumed { devices_per_host: per_host, ..Assumed::default() });
    Problem::new(vec![("t".into(), src, dst)], hosts).expect("the seed makes good problems")
}

/// A layout by boxes on its own.
pub fn layout(seed: u64) -> Layout {
    let mut seed = Seed(seed);
    let grain = grain(&mut seed);
    let dims = dims(&mut seed, grain);
    let mesh = mesh(&mut seed, "A", grain);
    let partial = seed.one_in(4);
    box_layout(&mut seed, &mesh, "f32", &dims, Side::Source { partial }, grain)
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Side {
    /// Every element has a holder, of every part of a sum.
    Source { partial: bool },
    /// Nobody wants an element twice.
    Destination,
}

fn mesh(seed: &mut Seed, name: &'static str, grain: Grain) -> MeshDraft {
    let len = 1 + seed.below(grain.devices);
    let axes = if len.is_multiple_of(2) && seed.one_in(2) { vec![2, len / 2] } else { vec![len] };
    MeshDraft { name, axes, first_rank: None }
}

fn box_layout(
    seed: &mut Seed,
    mesh: &MeshDraft,
    dtype: &str,
    dims: &[usize],
    side: Side,
    grain: Grain,
) -> Layout {
    let devices = mesh.len();
    let mut held: Vec<Vec<Draft>> = vec![vec![]; devices];
    let sum_over = match side {
        Side::Source { partial: true } => mesh.axes[0],
        _ => 1,
    };
    // Positions along the first axis lie this far apart.
    let inner = devices / mesh.axes[0];
    for part in 0..sum_over {
        let of_part: Vec<usize> = (0..devices).filter(|p| sum_over == 1 || p / inner == part).collect();
        deal(seed, &of_part, dims, side, grain, &mut held);
    }
    let lists: Vec<String> = held
        .iter_mut()
        .enumerate()
        .filter(|(_, boxes)| !boxes.is_empty())
        .map(|(position, boxes)| format!("{position}: {}", in_memory(seed, boxes, dims)))
        .collect();
    let sum = if sum_over > 1 { " | sum x0" } else { "" };
    let lens: Vec<String> = dims.iter().map(usize::to_string).collect();
    let text = format!("{dtype}[{}]@{}{{{}{sum}}}", lens.join(","), mesh.text(), lists.join("; "));
    text.parse().unwrap_or_else(|e| panic!("the seed made a bad layout: {e}"))
}

/// Cuts the tensor up and gives every box to some of these positions.
fn deal(
    seed: &mut Seed,
    positions: &[usize],
    dims: &[usize],
    side: Side,
    grain: Grain,
    held: &mut [Vec<Draft>],
) {
    if dims.contains(&0) {
        return;
    }
    let whole: Draft = dims.iter().map(|&len| (0, len)).collect();
    let count = if seed.one_in(3) { grain.boxes } else { 1 + seed.below(grain.boxes) };
    let replicas = 1 + seed.below(2);
    for piece in cut_up(seed, whole.clone(), count) {
        if side == Side::Destination && seed.one_in(5) {
            continue;
        }
        for copy in 0..replicas {
            let to = seed.pick(positions);
            if copy == 0 || !held[to].contains(&piece) {
                held[to].push(piece.clone());
            }
        }
    }
    // Boxes across the others: whole rows, runs, anything.
    for _ in 0..seed.below(4) {
        let across: Draft = dims.iter().map(|&len| span(seed, len)).collect();
        let to = seed.pick(positions);
        if side != Side::Destination || held[to].iter().all(|b| !overlap(b, &across)) {
            held[to].push(across);
        }
    }
}

fn span(seed: &mut Seed, len: usize) -> (usize, usize) {
    let start = seed.below(len);
    (start, start + 1 + seed.below(len - start))
}

fn overlap(a: &Draft, b: &Draft) -> bool {
    a.iter().zip(b).all(|(a, b)| a.0.max(b.0) < a.1.min(b.1))
}

/// Straight cuts through one box after the other.
fn cut_up(seed: &mut Seed, whole: Draft, count: usize) -> Vec<Draft> {
    let mut boxes = vec![whole];
    for _ in 0..4 * count {
        if boxes.len() == count {
            break;
        }
        let at = seed.below(boxes.len());
        let long: Vec<usize> =
            (0..boxes[at].len()).filter(|&d| boxes[at][d].1 - boxes[at][d].0 > 1).collect();
        if long.is_empty() {
            continue;
        }
        let dim = seed.pick(&long);
        let (start, end) = boxes[at][dim];
        let cut = start + 1 + seed.below(end - start - 1);
        let mut second = boxes[at].clone();
        boxes[at][dim] = (start, cut);
        second[dim] = (cut, end);
        boxes.push(second);
    }
    boxes
}

/// The boxes of one device as text, in some order and some places of its memory.
fn in_memory(seed: &mut Seed, boxes: &mut [Draft], dims: &[usize]) -> String {
    for i in (1..boxes.len()).rev() {
        boxes.swap(i, seed.below(i + 1));
    }
    let apart = (0..boxes.len()).all(|i| boxes[..i].iter().all(|b| !overlap(b, &boxes[i])));
    let placed: Vec<String> = match seed.below(4) {
        0 if apart => in_a_frame(seed, boxes, dims),
        1 => strided(seed, boxes),
        2 => with_gaps(seed, boxes),
        _ => boxes.iter().map(text).collect(),
    };
    placed.join(" ")
}

fn text(draft: &Draft) -> String {
    let spans: Vec<String> = draft.iter().map(|(start, end)| format!("{start}:{end}")).collect();
    format!("[{}]", spans.join(", "))
}

/// Views of one buffer as wide as the tensor, or wider.
fn in_a_frame(seed: &mut Seed, boxes: &[Draft], dims: &[usize]) -> Vec<String> {
    let pads: Vec<usize> = dims.iter().map(|len| len + seed.below(3)).collect();
    let mut strides = vec![1 + seed.below(2); dims.len()];
    for dim in (1..dims.len()).rev() {
        strides[dim - 1] = strides[dim] * pads[dim];
    }
    let by: Vec<String> = strides.iter().map(usize::to_string).collect();
    let by = if by.is_empty() { String::new() } else { format!(" by {}", by.join(",")) };
    let place = |b: &Draft| {
        let at: usize = b.iter().zip(&strides).map(|((start, _), stride)| start * stride).sum();
        format!("{} at {at}{by}", text(b))
    };
    boxes.iter().map(place).collect()
}

/// Each box on its own, its dims in some order, some of them padded.
fn strided(seed: &mut Seed, boxes: &[Draft]) -> Vec<String> {
    let mut place = |b: &Draft| {
        let mut order: Vec<usize> = (0..b.len()).collect();
        order.iter_mut().for_each(|d| *d = b.len() - 1 - *d);
        let mut strides = vec![0; b.len()];
        let mut next = 1 + seed.below(2);
        for &dim in &order[seed.below(order.len())..].iter().chain(&order).copied().collect::<Vec<_>>() {
            if strides[dim] == 0 {
                strides[dim] = next;
                next *= b[dim].1 - b[dim].0 + seed.below(2);
            }
        }
        let by: Vec<String> = strides.iter().map(usize::to_string).collect();
        if by.is_empty() { text(b) } else { format!("{} by {}", text(b), by.join(",")) }
    };
    boxes.iter().map(&mut place).collect()
}

/// Row-major boxes with room between them, the last listed first.
fn with_gaps(seed: &mut Seed, boxes: &[Draft]) -> Vec<String> {
    let mut at = 0;
    let mut placed: Vec<String> = Vec::new();
    for b in boxes {
        at += seed.below(3);
        placed.push(format!("{} at {at}", text(b)));
        at += b.iter().map(|(start, end)| end - start).product::<usize>();
    }
    placed.reverse();
    placed
}
