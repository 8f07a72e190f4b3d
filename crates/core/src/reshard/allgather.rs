//! `allgather`: devices of a host that want the same get a slice each, and gather the rest from each other (the
//! baseline of Alpa, and Megatron's scatter/gather).
//!
//! ```text
//! c0..c3 want the same box          network            inside the host
//!                               c0 |0|. . .|      c0 -> c1 -> c2 -> c3 -> c0
//!                               c1 |.|1|. .|      a ring: every device passes on
//!                               c2 |. .|2|.|      what it got last, until all have
//!                               c3 |. . .|3|      everything
//! ```
//!
//! Its weaknesses are kept, because they are what it is compared for. Slices are equal: along the dims in order, as
//! many as the greatest common divisor of the replicas and what the dim still has. Three devices and a power of two
//! have none, and fall back to whole copies. So do replicas on several hosts, and tiles of different sizes.
//!
//! Slices travel by the rules of [`super::draft`]. The gather follows each slice chunk by chunk and is in nobody's
//! stream, as it uses no NIC.

use std::fmt;

use crate::cluster::Topology;
use crate::id::{Rank, RegionId, TransferId};
use crate::region::{Region, Span};

use super::draft::Draft;
use super::pieces::Tile;
use super::plan::Plan;
use super::problem::{PlanError, Problem};
use super::sendrecv::{SenderLoads, send_tasks};
use super::strategy::{PlanOptions, Strategy};
use super::unit::UnitTasks;

pub fn plan(problem: &Problem, options: &PlanOptions) -> Result<Plan, PlanError> {
    let mut draft = Draft::new(problem, options, Strategy::AllGather)?;
    let mut loads = SenderLoads::new(&problem.topology);
    for units in UnitTasks::of_all(problem)? {
        let layout = &problem.reshards[units.tensor as usize].dst.layout;
        match Slicing::decide(&units, &problem.topology) {
            Ok(slicing) => {
                let reason = slicing.to_string();
                draft.plan.reasons.push(format!("{}: {reason}", layout.summary()));
                scatter_gather(&mut draft, &units, &slicing, &mut loads);
            }
            Err(whole) => {
                draft.plan.reasons.push(format!("{}: sent whole, {whole}", layout.summary()));
                send_tasks(&mut draft, &units, &mut loads);
            }
        }
    }
    draft.finish()
}

/// Why a tensor is sent whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whole {
    NoReplicas,
    SeveralHosts,
    UnevenTiles,
    NoCommonDivisor { replicas: u64 },
}

impl fmt::Display for Whole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Whole::NoReplicas => f.write_str("as no two devices want the same"),
            Whole::SeveralHosts => f.write_str("as replicas lie on several hosts"),
            Whole::UnevenTiles => f.write_str("as its tiles differ in size or have several parts"),
            Whole::NoCommonDivisor { replicas } => {
                write!(f, "as no dim can be cut into equal slices for {replicas} devices")
            }
        }
    }
}

/// Into how many slices every tile is cut along each dim.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Slicing {
    /// Of every destination tile; all have the same lengths.
    tile_boxes: Vec<Region>,
    factors: Vec<u64>,
    /// Devices that get the same slice: 1, unless the sizes allow no finer cut.
    copies: u64,
}

impl Slicing {
    fn decide(units: &UnitTasks, topology: &Topology) -> Result<Self, Whole> {
        let tiles = &units.dst_tiles;
        let replicas = tiles.first().map_or(1, |t| t.ranks.len() as u64);
        if replicas <= 1 {
            return Err(Whole::NoReplicas);
        }
        let spans_hosts = |t: &Tile| t.ranks.iter().any(|r| !topology.same_host(*r, t.ranks[0]));
        if tiles.iter().any(spans_hosts) {
            return Err(Whole::SeveralHosts);
        }
        let tile_boxes = even_boxes(units).ok_or(Whole::UnevenTiles)?;
        let mut copies = replicas;
        let factors: Vec<u64> = tile_boxes[0]
            .spans()
            .iter()
            .map(|span| {
                let len = span.len();
                let factor = gcd(copies, len);
                copies /= factor;
                factor
            })
            .collect();
        if copies == replicas {
            return Err(Whole::NoCommonDivisor { replicas });
        }
        Ok(Self { tile_boxes, factors, copies })
    }

    fn num_slices(&self) -> u64 {
        self.factors.iter().product()
    }

    /// The coordinates of a slice, row-major.
    fn coord(&self, slice: u64) -> Vec<u64> {
        let mut rest = slice;
        let mut coord = vec![0; self.factors.len()];
        for (c, factor) in coord.iter_mut().zip(&self.factors).rev() {
            *c = rest % factor;
            rest /= factor;
        }
        coord
    }

    fn cut(&self, tile: &Region, coord: &[u64]) -> Region {
        let spans = tile.spans().iter().zip(&self.factors).zip(coord).map(|((span, factor), c)| {
            let len = span.len() / factor;
            Span::new(span.start + c * len, span.start + (c + 1) * len)
        });
        Region::new(spans.collect())
    }
}

impl fmt::Display for Slicing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let factors: Vec<String> = self.factors.iter().map(u64::to_string).collect();
        write!(f, "tiles cut into {} slices and gathered inside the host", factors.join("x"))?;
        if self.copies > 1 {
            write!(f, "; no finer cut is even, so every slice is sent {} times", self.copies)?;
        }
        Ok(())
    }
}

/// The box of every destination tile, where each is one box, all have the same lengths, and no device is in two tiles.
fn even_boxes(units: &UnitTasks) -> Option<Vec<Region>> {
    let boxes: Vec<Region> =
        (0..units.dst_tiles.len()).map(|tile| only_box(units, tile)).collect::<Option<_>>()?;
    let lens = |region: &Region| region.spans().iter().map(|s| s.len()).collect::<Vec<u64>>();
    let first = lens(boxes.first()?);
    let mut ranks: Vec<Rank> = units.dst_tiles.iter().flat_map(|t| t.ranks.iter().copied()).collect();
    ranks.sort_unstable();
    let even = boxes.iter().all(|b| lens(b) == first)
        && units.dst_tiles.iter().all(|t| t.ranks.len() == units.dst_tiles[0].ranks.len());
    (even && ranks.is_sorted_by(|a, b| a < b)).then_some(boxes)
}

/// The box that all pieces of a destination tile fill together, if they fill one.
fn only_box(units: &UnitTasks, dst_tile: usize) -> Option<Region> {
    let pieces = || units.tasks_of(dst_tile).iter().flat_map(|task| units.boxes(task));
    let first = pieces().next()?;
    let span = |dim: usize| {
        let spans = pieces().map(|r| r.spans()[dim]);
        let start = spans.clone().map(|s| s.start).min().unwrap_or(0);
        Span::new(start, spans.map(|s| s.end).max().unwrap_or(start))
    };
    let bounds = Region::new((0..first.num_dims()).map(span).collect());
    (pieces().map(Region::volume).sum::<u64>() == bounds.volume()).then_some(bounds)
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A slice of a destination tile, as the layout cut that fine would have it.
struct Slice {
    dst_tile: usize,
    index: u64,
    region: Region,
}

/// A box of a slice, and how it came to the device that gathers from it: `None` where it was there from the start.
struct Arrived {
    region: RegionId,
    src_tile: u32,
    /// For every copy of the slice.
    by: Vec<Option<TransferId>>,
}

fn scatter_gather(draft: &mut Draft, units: &UnitTasks, slicing: &Slicing, loads: &mut SenderLoads) {
    let n = slicing.num_slices() as usize;
    let mut arrived: Vec<Vec<Vec<Arrived>>> =
        units.dst_tiles.iter().map(|_| (0..n).map(|_| vec![]).collect()).collect();
    for slice in slices(slicing) {
        for task in units.tasks_of(slice.dst_tile) {
            for piece in units.boxes(task).iter().filter_map(|b| b.intersect(&slice.region)) {
                let got = scatter(draft, units, slicing, &slice, task.src_tile, piece, loads);
                arrived[slice.dst_tile][slice.index as usize].push(got);
            }
        }
    }
    for (tile, slices) in units.dst_tiles.iter().zip(&arrived) {
        for copy in 0..slicing.copies as usize {
            gather(draft, units, &tile.ranks[copy * n..][..n], slices, copy);
        }
    }
}

/// The slices of all tiles, in row-major order.
fn slices(slicing: &Slicing) -> Vec<Slice> {
    let mut out = Vec::new();
    for (dst_tile, tile) in slicing.tile_boxes.iter().enumerate() {
        out.extend((0..slicing.num_slices()).map(|index| {
            let region = slicing.cut(tile, &slicing.coord(index));
            Slice { dst_tile, index, region }
        }));
    }
    out.sort_by(|a, b| a.region.cmp(&b.region));
    out
}

/// Sends a box of a slice to every device that gets the slice.
fn scatter(
    draft: &mut Draft,
    units: &UnitTasks,
    slicing: &Slicing,
    slice: &Slice,
    src_tile: u32,
    piece: Region,
    loads: &mut SenderLoads,
) -> Arrived {
    let bytes = piece.volume() * units.elem_bytes;
    let region = draft.plan.add_region(piece);
    let (holders, ranks) =
        (&units.src_tiles[src_tile as usize].ranks, &units.dst_tiles[slice.dst_tile].ranks);
    let by = (0..slicing.copies)
        .map(|copy| {
            let receiver = ranks[(copy * slicing.num_slices() + slice.index) as usize];
            if units.holds(receiver, src_tile) {
                return None;
            }
            let sender = loads.pick(holders, receiver, bytes);
            let id = draft.send(units.tensor, sender, receiver, region, None);
            draft.end_op();
            Some(id)
        })
        .collect();
    Arrived { region, src_tile, by }
}

/// The ring: in step k every device passes on the slice that started k devices before it. Box by box, so that a box
/// that arrived early does not queue behind one that is still on its way.
fn gather(draft: &mut Draft, units: &UnitTasks, ring: &[Rank], slices: &[Vec<Arrived>], copy: usize) {
    let n = ring.len();
    for i in 0..slices.iter().map(Vec::len).max().unwrap_or(0) {
        let mut boxes: Vec<Option<Hop>> = slices
            .iter()
            .enumerate()
            .map(|(s, boxes)| boxes.get(i).map(|b| Hop { arrived: b, at: ring[s], by: b.by[copy] }))
            .collect();
        for step in 0..n - 1 {
            for (s, hop) in boxes.iter_mut().enumerate() {
                if let Some(hop) = hop {
                    hop.pass_on(draft, units, ring[(s + step + 1) % n]);
                }
            }
        }
    }
}

/// A box on its way around the ring.
struct Hop<'a> {
    arrived: &'a Arrived,
    at: Rank,
    by: Option<TransferId>,
}

impl Hop<'_> {
    fn pass_on(&mut self, draft: &mut Draft, units: &UnitTasks, to: Rank) {
        self.by = if units.holds(to, self.arrived.src_tile) {
            None
        } else {
            let after: Vec<TransferId> = self.by.into_iter().collect();
            Some(draft.forward(units.tensor, self.at, to, self.arrived.region, &after))
        };
        self.at = to;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reshard::testing::{in_t, pairs, problem};

    fn plan_of(src: &str, dst: &str) -> Plan {
        plan(&problem(&[(src, dst)]), &PlanOptions::default()).unwrap()
    }

    fn slicing(dst: &str) -> Result<Slicing, Whole> {
        let problem = problem(&[(dst, dst)]);
        let units = UnitTasks::of(&problem, 0).unwrap();
        Slicing::decide(&units, &problem.topology)
    }

    #[test]
    fn dims_are_cut_in_order_by_the_common_divisor() {
        let factors = |dst: &str| slicing(dst).map(|s| (s.factors, s.copies));
        assert_eq!(factors("f32[4,8,16]@B{x:1,y:2}(_,_,_)"), Ok((vec![2, 1, 1], 1)));
        assert_eq!(factors("f32[3,8,2]@B{x:1,y:2}(_,_,_)"), Ok((vec![1, 2, 1], 1)));
        assert_eq!(factors("f32[6,8,16]@B{x:1,y:4}(_,_,_)"), Ok((vec![2, 2, 1], 1)));
        assert_eq!(factors("f32[2,1024]@B{x:1,y:4}(_,_)"), Ok((vec![2, 2], 1)));
        assert_eq!(factors("f32[8]@B{x:2,y:2}(x)"), Ok((vec![2], 1)));
        assert_eq!(factors("f32[8]@B{x:1,y:6}(_)"), Ok((vec![2], 3)));
    }

    #[test]
    fn what_cannot_be_sliced_is_sent_whole_with_a_reason() {
        assert_eq!(slicing("f32[8]@B{x:2,y:2}(x+y)"), Err(Whole::NoReplicas));
        assert_eq!(slicing("f32[8]@B{x:2,y:2}(_)"), Err(Whole::SeveralHosts));
        assert_eq!(slicing("f32[8]@B{x:2,y:2}(y)"), Err(Whole::SeveralHosts));
        assert_eq!(slicing("f32[8]@B{x:1,y:3}(_)"), Err(Whole::NoCommonDivisor { replicas: 3 }));
        assert_eq!(slicing("f32[9]@B{x:2,y:2}(x)"), Err(Whole::UnevenTiles));
        assert_eq!(slicing("f32[8]@B{x:2,y:2}(x of 4+4)"), Err(Whole::UnevenTiles));
        let plan = plan_of("f32[8]@A{x:1,y:1}(_)", "f32[8]@B{x:1,y:3}(_)");
        assert!(plan.reasons[0].ends_with("cut into equal slices for 3 devices"), "{:?}", plan.reasons);
        assert_eq!(pairs(&plan), ["r0->r1", "r0->r2", "r0->r3"]);
    }

    #[test]
    fn a_ring_carries_every_slice_around() {
        let plan = plan_of("f32[6]@A{x:1,y:1}(_)", "f32[6]@B{x:1,y:3}(_)");
        let ring = ["r1->r2", "r2->r3", "r3->r1", "r2->r3", "r3->r1", "r1->r2"];
        assert_eq!(pairs(&plan)[3..], ring);
        let after = |i: usize| plan.after(&plan.transfers()[i]).iter().map(|t| t.0).collect::<Vec<_>>();
        // Slice 0 arrives by transfer 0, moves on by 3, and from there by 6.
        assert_eq!((after(3), after(6)), (vec![0], vec![3]));
        assert_eq!(plan.regions()[plan.transfers()[6].region.index()].to_string(), "[0:2]");
        assert_eq!(in_t(&plan), 1.0);
    }

    #[test]
    fn leftover_replicas_get_the_slice_again() {
        let plan = plan_of("f32[8]@A{x:1,y:1}(_)", "f32[8]@B{x:1,y:6}(_)");
        assert_eq!(plan.transfers().iter().filter(|t| plan.crosses_hosts(t)).count(), 6);
        assert_eq!(in_t(&plan), 3.0);
    }

    #[test]
    fn a_holder_gathers_from_what_it_has() {
        // Each of four devices has a quarter and wants all: the ring alone, 4 * 3 transfers.
        let plan = plan_of("f32[8]@A{x:1,y:4}(y)", "f32[8]@A{x:1,y:4}(_)");
        assert_eq!(plan.transfers().len(), 12);
        assert!(plan.transfers().iter().all(|t| plan.region(t).volume() == 2));
        // Half a quarter each where two hold the same half.
        let plan = plan_of("f32[8]@A{x:2,y:2}=0-3(y)", "f32[8]@B{z:4}=0-3(_)");
        assert_eq!(plan.bytes_moved(), 4 * 4 * 4);
    }
}
