//! Where a card's time goes: with the variable [`VARIABLE`] set, every call is timed by the card's own clock, and a table says how long each kind took.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use crossmesh_cuda::CudaError;
use crossmesh_cuda::cuda::marks::Mark;
use crossmesh_cuda::cuda::ops::Queue;

/// Names the file that tables go to; a rank's number is put behind it.
pub const VARIABLE: &str = "CROSSMESH_GPU_TIMES";

/// See the module.
#[derive(Debug, Default)]
pub struct Times {
    under_way: Mutex<Vec<(&'static str, Mark, Mark)>>,
    /// Calls and seconds, by name.
    done: Mutex<BTreeMap<&'static str, (u64, f64)>>,
}

impl Times {
    /// If they are asked for.
    pub fn asked() -> Option<Self> {
        std::env::var_os(VARIABLE).map(|_| Self::default())
    }

    /// Times what a call queues.
    pub fn of<T>(
        &self,
        name: &'static str,
        queue: &Queue,
        call: impl FnOnce() -> Result<T, CudaError>,
    ) -> Result<T, CudaError> {
        let start = queue.mark()?;
        let value = call()?;
        let end = queue.mark()?;
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner).push((name, start, end));
        Ok(value)
    }

    /// The queue is done: counts what was under way.
    pub fn settle(&self) {
        let ended = std::mem::take(&mut *self.under_way.lock().unwrap_or_else(PoisonError::into_inner));
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, start, end) in ended {
            let (count, seconds) = done.entry(name).or_default();
            *count += 1;
            *seconds += start.until(&end);
        }
    }

    /// A line for each, the longest first.
    pub fn table(&self) -> String {
        let done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        let mut rows: Vec<_> = done.iter().collect();
        rows.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        let total: f64 = rows.iter().map(|(_, (_, seconds))| seconds).sum();
        let mut text = format!("the card's time, {:.1} ms in all\n", total * 1e3);
        for (name, (count, seconds)) in rows {
            let share = 100.0 * seconds / total.max(1e-12);
            let _ = writeln!(text, "  {:>9.2} ms {share:5.1} %  {count:>7} x  {name}", seconds * 1e3);
        }
        text
    }
}
