//! Attention by cuDNN: one fused kernel each way, described as a graph of small operations that the library recognises (its backend API).
//!
//! ```text
//! forward     S = scale Q K'   masked   P = softmax(S), lse   Y = P V
//! backward    D = sum(dY Y)    P = exp(S - lse)   dV = P' dY   dS = scale P (dY V' - D)   dK = dS' Q   dQ = dS K
//! ```
//!
//! The library has no kernel for any other order of these operations: they stand here as its own frontend has them. A plan is built for every size once.
//! It is for bf16, heads of at most 128 columns in eights, as many queries as keys, and no dropout, whose draws are not ours: [`Dnn::takes`].
//! Everything else is [`super::attend`]'s.
#![allow(
    clippy::missing_safety_doc,
    reason = "as in `ops`: addresses of the card's, that stay until the queue is done"
)]

mod graph;
mod library;
mod plans;

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

use super::attend::{Attention, Heads};
use super::lock;
use super::ops::{At, Queue};
use crate::CudaError;
use crate::driver::Driver as _;
use graph::Plan;
use library::{Library, kind, types};
use plans::{Key, Numbers, ids};

/// A plan, or why there is none.
type Made = Result<Arc<Mutex<Plan>>, CudaError>;

/// See the module.
#[derive(Debug)]
pub struct Dnn {
    /// Before the library: they go first.
    plans: Mutex<HashMap<Key, Made>>,
    library: Library,
    /// Whether the same bits have to come out: then gradients of queries are summed up in order.
    deterministic: bool,
}

impl Dnn {
    /// The library, if it is there in a version that does. The context has to be the calling thread's.
    pub fn open(queue: &Queue, deterministic: bool) -> Result<Self, CudaError> {
        let library = Library::open(&queue.cuda().card().name, queue.stream())?;
        Ok(Self { library, deterministic, plans: Mutex::default() })
    }

    pub fn version(&self) -> usize {
        self.library.version
    }

    /// Whether it can do it: see the module.
    pub fn takes(size: &Attention) -> bool {
        let whole = size.head_dim.is_multiple_of(8) && size.head_dim <= 128 && size.head_dim > 0;
        whole && size.queries == size.keys && size.queries >= 64 && size.dropout.is_none()
    }

    /// Bytes of scratch memory that it needs for a size: the plan's, and for gradients sums of queries behind it. An error where the library refuses it.
    pub fn prepare(
        &self,
        size: &Attention,
        given: [Heads; 3],
        gradients: Option<[Heads; 3]>,
    ) -> Result<u64, CudaError> {
        let (plan, sums) = (self.plan(size, given, gradients)?, sums(size, self.deterministic));
        let workspace = lock(&plan).workspace.next_multiple_of(256);
        Ok(if gradients.is_some() { workspace + sums.iter().sum::<u64>() } else { workspace })
    }

    fn plan(&self, size: &Attention, given: [Heads; 3], gradients: Option<[Heads; 3]>) -> Made {
        let key = Key::new(size, given, gradients);
        let mut plans = lock(&self.plans);
        if let Some(plan) = plans.get(&key) {
            return plan.clone();
        }
        let made = match key.backward {
            true => plans::backward(&self.library, &key, self.deterministic),
            false => plans::forward(&self.library, &key),
        };
        let made = made.map(|plan| Arc::new(Mutex::new(plan)));
        plans.insert(key, made.clone());
        made
    }

    /// `y` and `lse`, as of [`Queue::attention`]; `scratch` is as large as [`Dnn::prepare`] said.
    pub unsafe fn forward(
        &self,
        size: &Attention,
        given @ [q, k, v]: [Heads; 3],
        scratch: At,
        (y, lse): (At, At),
    ) -> Result<(), CudaError> {
        let plan = self.plan(size, given, None)?;
        let numbers = Numbers::new(size);
        let ids = [(ids::Q, q.at), (ids::K, k.at), (ids::V, v.at), (ids::Y, y), (ids::LSE, lse)];
        // SAFETY: as the caller says.
        unsafe { self.run(&lock(&plan), &ids, &numbers, scratch) }
    }

    /// Gradients, as of [`Queue::attention_backward`].
    pub unsafe fn backward(
        &self,
        size: &Attention,
        given @ [q, k, v]: [Heads; 3],
        (y, dy, lse): (At, At, At),
        scratch: At,
        gradients @ [dq, dk, dv]: [Heads; 3],
    ) -> Result<(), CudaError> {
        let plan = self.plan(size, given, Some(gradients))?;
        let (numbers, plan) = (Numbers::new(size), lock(&plan));
        let deltas = scratch + plan.workspace.next_multiple_of(256);
        let [of_deltas, _] = sums(size, self.deterministic);
        let ids = [
            (ids::Q, q.at),
            (ids::K, k.at),
            (ids::V, v.at),
            (ids::Y, y),
            (ids::DY, dy),
            (ids::LSE, lse),
            (ids::DELTAS, deltas),
            (ids::DQ, dq.at),
            (ids::DK, dk.at),
            (ids::DV, dv.at),
            (ids::DQ_SUMS, deltas + of_deltas),
        ];
        // SAFETY: as the caller says.
        unsafe { self.run(&plan, &ids, &numbers, scratch) }
    }

    unsafe fn run(
        &self,
        plan: &Plan,
        places: &[(i64, At)],
        numbers: &Numbers,
        scratch: At,
    ) -> Result<(), CudaError> {
        let values = [(ids::SCALE, &numbers.scale), (ids::MASKED, &numbers.masked), (ids::ONE, &numbers.one)];
        let places = places.iter().map(|(id, at)| (*id, *at as usize as *const c_void));
        let all = places.chain(values.map(|(id, value)| (id, (&raw const *value).cast())));
        let (ids, pointers): (Vec<i64>, Vec<*const c_void>) =
            all.filter(|(id, _)| plan.placed.contains(id)).unzip();
        let workspace = scratch as usize as *const c_void;
        let pack = self.library.descriptor(
            kind::VARIANT_PACK,
            &[
                (1000, types::INT64, ids.len(), ids.as_ptr().cast()),
                (1001, types::VOID_PTR, pointers.len(), pointers.as_ptr().cast()),
                (1003, types::VOID_PTR, 1, (&raw const workspace).cast()),
            ],
        )?;
        // SAFETY: as the caller says; numbers by value are read before the call returns.
        unsafe { self.library.execute(&plan.plan, &pack) }
    }
}

/// Bytes of the sums that gradients want: of every query, and of queries' gradients where these are summed as they come.
fn sums(size: &Attention, deterministic: bool) -> [u64; 2] {
    let rows = u64::from(size.samples) * u64::from(size.heads) * u64::from(size.queries);
    let each = if deterministic { 0 } else { rows * u64::from(size.head_dim) * 4 };
    [(rows * 4).next_multiple_of(256), each]
}
