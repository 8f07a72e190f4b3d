//! A rank's program on the arrays that a caller brought.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crossmesh_comm::arrays::{Strided, one_array};
use crossmesh_comm::buffer::{Base, BindError, RankBuffers};
use crossmesh_comm::memory::Memory;
use crossmesh_core::id::Rank;
use crossmesh_core::program::{Role, Tile};
use crossmesh_core::verify::VerifiedRank;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::array::{Brought, Whose};
use crate::errors::{ArrayError, JobError};
use crate::plan::Plan;

/// Which bytes transfers under way have: nobody else may have them if anybody writes.
#[derive(Default)]
pub struct InUse(Mutex<Table>);

#[derive(Default)]
struct Table {
    next: u64,
    /// By number: first byte, behind the last, whether it is written to.
    ranges: BTreeMap<u64, Vec<(u64, u64, bool)>>,
}

/// Bytes that a transfer has, until this is dropped.
struct Held {
    table: Arc<InUse>,
    number: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.table.0.lock().unwrap_or_else(PoisonError::into_inner).ranges.remove(&self.number);
    }
}

impl InUse {
    /// Takes all of them; else the first that somebody has.
    fn take(self: &Arc<Self>, wanted: Vec<(u64, u64, bool)>) -> Result<Held, usize> {
        let mut table = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let meets = |a: &(u64, u64, bool), b: &(u64, u64, bool)| a.0 < b.1 && b.0 < a.1 && (a.2 || b.2);
        let busy = |a: &(u64, u64, bool)| table.ranges.values().flatten().any(|b| meets(a, b));
        if let Some(at) = wanted.iter().position(busy) {
            return Err(at);
        }
        let number = table.next;
        table.next += 1;
        table.ranges.insert(number, wanted);
        Ok(Held { table: self.clone(), number })
    }
}

/// A program on its arrays.
pub struct Bound {
    /// None on a rank that the plan does not know.
    pub buffers: Option<RankBuffers>,
    /// To be dropped when the transfer has ended.
    pub keep: Box<dyn Any + Send>,
}

/// Binds a rank's part of a plan to `mine` and `out`, by name.
pub fn bind(
    py: Python<'_>,
    plan: &Plan,
    rank: Rank,
    mine: &pyo3::Bound<'_, PyDict>,
    out: &pyo3::Bound<'_, PyDict>,
    in_use: &Arc<InUse>,
) -> PyResult<Bound> {
    for (given, what) in [(mine, "mine"), (out, "out")] {
        check_names(plan, given, what)?;
    }
    if rank.index() >= plan.num_ranks() {
        return Ok(Bound { buffers: None, keep: Box::new(()) });
    }
    let program = plan.verified(py)?.rank(rank);
    let cannot = |e: std::io::Error| JobError::new_err(format!("rank {} has no memory: {e}", rank.0));
    let staged = match program.extra_bytes() {
        // Most programs stage nothing, and a segment costs more than a small transfer.
        0 => Memory::of_vec(Vec::<u8>::new()),
        bytes => Memory::shared(bytes + 64 * program.buffers.len() as u64).map_err(cannot)?,
    };
    let staged = Arc::new(staged);
    let (mut bound, mut ranges, mut names, mut next) = (vec![], vec![], vec![], 0);
    for (index, buffer) in program.buffers.iter().enumerate() {
        let (tensor, is_out) = match buffer.role {
            Role::Source(tensor) => (tensor, false),
            Role::Destination(tensor) => (tensor, true),
            _ => {
                bound.push((Base { memory: staged.clone(), at: next }, None));
                names.push(None);
                next += buffer.bytes.next_multiple_of(64);
                continue;
            }
        };
        let (name, dtype) = plan.tensor(tensor);
        let whose = Whose { tensor: name, rank: rank.0, out: is_out };
        let given = if is_out { out } else { mine }.get_item(name)?;
        let given = given.ok_or_else(|| {
            whose.error(
                "missing\nhint: give all shards that this rank holds, and all that it is to get, by name",
            )
        })?;
        let brought = Brought::take(&given, dtype, whose)?;
        let (start, bytes) = brought.extent(dtype);
        ranges.push((start, start.saturating_add(bytes), is_out));
        let (base, array) = brought.base(dtype);
        let array = laid_out(&program, index, array, buffer.bytes / dtype.bytes(), dtype.bytes());
        bound.push((base, array.map_err(|expected| whose.error(expected))?));
        names.push(Some((name, is_out)));
    }
    let whose = |buffer: usize| {
        let (tensor, out) = names.get(buffer).copied().flatten().unwrap_or(("", false));
        Whose { tensor, rank: rank.0, out }
    };
    let in_order: Vec<usize> = (0..names.len()).filter(|at| names[*at].is_some()).collect();
    let buffers = RankBuffers::bind_arrays(program, bound).map_err(|error| match error {
        BindError::Array { buffer, cause } => whose(buffer).error(cause),
        BindError::Overlap { one, other } => {
            let other = whose(other);
            let side = if other.out { "out" } else { "source" };
            whose(one).error(format!(
                "it shares memory with `{}`, {side}\nhint: give each tensor memory of its own",
                other.tensor
            ))
        }
        other => ArrayError::new_err(other.to_string()),
    })?;
    let held = in_use.take(ranges).map_err(|at| {
        whose(in_order[at]).error("a transfer under way has its memory\nhint: wait for that one first")
    })?;
    Ok(Bound { buffers: Some(buffers), keep: Box::new(held) })
}

/// How an array lies, where it is one; a shard whose boxes have their own places in memory is one row.
fn laid_out(
    program: &VerifiedRank,
    buffer: usize,
    array: Strided,
    elements: u64,
    width: u64,
) -> Result<Option<Strided>, String> {
    let tiles = program.tiles.iter().filter(|tile| tile.buffer as usize == buffer);
    let place = |tile: &Tile| tile.strides.is_none().then_some(tile.offset / width);
    let boxes: Vec<_> = tiles.map(|tile| (&program.whole().boxes[tile.region], place(tile))).collect();
    if one_array(&boxes).is_some() {
        return Ok(Some(array));
    }
    let count: u64 = array.shape.iter().product();
    let row = Strided::packed(&array.shape, width) == array;
    match row && count == elements {
        true => Ok(None),
        false => {
            Err(format!("{elements} elements in one row are expected, shape {:?} was given", array.shape))
        }
    }
}

/// Names that the plan does not know are mistakes.
fn check_names(plan: &Plan, given: &pyo3::Bound<'_, PyDict>, what: &str) -> PyResult<()> {
    for name in given.keys() {
        let name: String = name.extract()?;
        if !plan.knows(&name) {
            return Err(ArrayError::new_err(format!(
                "{what} has a tensor `{name}`, which the plan does not know\nhint: it has {}",
                plan.some_names()
            )));
        }
    }
    Ok(())
}
