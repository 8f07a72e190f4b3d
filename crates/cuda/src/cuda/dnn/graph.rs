//! A graph of small operations, and the plan that the library makes of it.

use std::ffi::c_void;

use super::library::{Descriptor, Library, Owned, data, kind, mode, types};
use super::plans::ids;
use crate::CudaError;

/// A tensor of a graph: its number, size and steps, and what it is made of.
#[derive(Debug, Clone, Copy)]
pub(super) struct Tensor {
    id: usize,
    pub(super) dims: [i64; 4],
}

/// A graph under way.
pub(super) struct Graph<'a> {
    library: &'a Library,
    tensors: Vec<Owned>,
    ops: Vec<Owned>,
    /// Descriptors that operations refer to.
    others: Vec<Owned>,
    /// Numbers of tensors that lie somewhere.
    placed: Vec<i64>,
}

/// A plan that runs.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) plan: Owned,
    pub(super) workspace: u64,
    /// The tensors that it has to be told the places of.
    pub(super) placed: Vec<i64>,
    /// Kept: the plan refers to them.
    _graph: Vec<Owned>,
}

// SAFETY: the library's plans and handles may be used by any thread, one at a time: they are behind a mutex.
unsafe impl Send for Plan {}

/// Where a tensor is: nowhere, in memory under a number, or a number of the host's under one.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Place {
    Nowhere,
    At(i64),
    Value(i64),
}

/// Steps of a packed tensor.
pub(super) fn packed([_, b, c, d]: [i64; 4]) -> [i64; 4] {
    [b * c * d, c * d, d, 1]
}

impl<'a> Graph<'a> {
    pub(super) fn new(library: &'a Library) -> Self {
        Self { library, tensors: vec![], ops: vec![], others: vec![], placed: vec![] }
    }

    pub(super) fn tensor(
        &mut self,
        place: Place,
        of: i32,
        dims: [i64; 4],
        steps: [i64; 4],
    ) -> Result<Tensor, CudaError> {
        let id = match place {
            Place::Nowhere => ids::FIRST_OTHER + self.tensors.len() as i64,
            Place::At(id) | Place::Value(id) => {
                self.placed.push(id);
                id
            }
        };
        let (aligned, nowhere, value) = (16i64, place == Place::Nowhere, matches!(place, Place::Value(_)));
        let tensor = self.library.descriptor(
            kind::TENSOR,
            &[
                (901, types::DATA_TYPE, 1, (&raw const of).cast()),
                (902, types::INT64, 4, dims.as_ptr().cast()),
                (903, types::INT64, 4, steps.as_ptr().cast()),
                (906, types::INT64, 1, (&raw const id).cast()),
                (900, types::INT64, 1, (&raw const aligned).cast()),
                (907, types::BOOLEAN, 1, (&raw const nowhere).cast()),
                (908, types::BOOLEAN, 1, (&raw const value).cast()),
            ],
        )?;
        self.tensors.push(tensor);
        Ok(Tensor { id: self.tensors.len() - 1, dims })
    }

    /// A tensor that only the graph sees.
    pub(super) fn inner(&mut self, of: i32, dims: [i64; 4]) -> Result<Tensor, CudaError> {
        self.tensor(Place::Nowhere, of, dims, packed(dims))
    }

    pub(super) fn value(&mut self, id: i64) -> Result<Tensor, CudaError> {
        self.tensor(Place::Value(id), data::F32, [1; 4], [1; 4])
    }

    fn raw(&self, tensor: Tensor) -> Descriptor {
        self.tensors[tensor.id].raw
    }

    /// `y = mode(x, b, t)`, computed in a type.
    pub(super) fn pointwise_to(
        &mut self,
        (which, of, axis): (i32, i32, Option<i64>),
        ins: &[Tensor],
        y: Tensor,
    ) -> Result<(), CudaError> {
        let axis_value = axis.unwrap_or(0);
        let mut about = vec![
            (0, types::POINTWISE_MODE, 1, (&raw const which).cast::<c_void>()),
            (1, types::DATA_TYPE, 1, (&raw const of).cast()),
        ];
        if axis.is_some() {
            about.push((9, types::INT64, 1, (&raw const axis_value).cast()));
        }
        let what = self.library.descriptor(kind::POINTWISE, &about)?;
        let raws: Vec<Descriptor> = ins.iter().map(|x| self.raw(*x)).collect();
        let (raw_what, raw_y) = (what.raw, self.raw(y));
        let mut attributes = vec![
            (750, types::DESCRIPTOR, 1, (&raw const raw_what).cast::<c_void>()),
            (753, types::DESCRIPTOR, 1, (&raw const raw_y).cast()),
        ];
        for (name, raw) in [751, 752, 758].into_iter().zip(&raws) {
            attributes.push((name, types::DESCRIPTOR, 1, (&raw const *raw).cast()));
        }
        let op = self.library.descriptor(kind::OPERATION_POINTWISE, &attributes)?;
        self.others.push(what);
        self.ops.push(op);
        Ok(())
    }

    /// The same in f32 into a tensor as large as the first.
    pub(super) fn pointwise(&mut self, which: i32, ins: &[Tensor]) -> Result<Tensor, CudaError> {
        let y = self.inner(data::F32, ins[0].dims)?;
        self.pointwise_to((which, data::F32, None), ins, y)?;
        Ok(y)
    }

    pub(super) fn matmul_to(&mut self, a: Tensor, b: Tensor, c: Tensor) -> Result<(), CudaError> {
        let of = data::F32;
        let what =
            self.library.descriptor(kind::MATMUL, &[(1500, types::DATA_TYPE, 1, (&raw const of).cast())])?;
        let [a, b, c, raw] = [self.raw(a), self.raw(b), self.raw(c), what.raw];
        let op = self.library.descriptor(
            kind::OPERATION_MATMUL,
            &[
                (1520, types::DESCRIPTOR, 1, (&raw const a).cast()),
                (1521, types::DESCRIPTOR, 1, (&raw const b).cast()),
                (1522, types::DESCRIPTOR, 1, (&raw const c).cast()),
                (1523, types::DESCRIPTOR, 1, (&raw const raw).cast()),
            ],
        )?;
        self.others.push(what);
        self.ops.push(op);
        Ok(())
    }

    pub(super) fn reduce_to(&mut self, which: i32, x: Tensor, y: Tensor) -> Result<(), CudaError> {
        let of = data::F32;
        let what = self.library.descriptor(
            kind::REDUCTION,
            &[
                (1601, types::DATA_TYPE, 1, (&raw const of).cast()),
                (1600, types::REDUCTION_OPERATOR, 1, (&raw const which).cast()),
            ],
        )?;
        let [x, y, raw] = [self.raw(x), self.raw(y), what.raw];
        let op = self.library.descriptor(
            kind::OPERATION_REDUCTION,
            &[
                (1610, types::DESCRIPTOR, 1, (&raw const x).cast()),
                (1611, types::DESCRIPTOR, 1, (&raw const y).cast()),
                (1612, types::DESCRIPTOR, 1, (&raw const raw).cast()),
            ],
        )?;
        self.others.push(what);
        self.ops.push(op);
        Ok(())
    }

    /// The same numbers seen otherwise.
    pub(super) fn reshape_to(&mut self, x: Tensor, y: Tensor) -> Result<(), CudaError> {
        let [x, y] = [self.raw(x), self.raw(y)];
        let op = self.library.descriptor(
            kind::OPERATION_RESHAPE,
            &[
                (2200, types::DESCRIPTOR, 1, (&raw const x).cast()),
                (2201, types::DESCRIPTOR, 1, (&raw const y).cast()),
            ],
        )?;
        self.ops.push(op);
        Ok(())
    }

    /// Scores of keys behind a query's own become what no exponential sees.
    pub(super) fn mask(&mut self, scores: Tensor) -> Result<Tensor, CudaError> {
        let [row, col] = [self.inner(data::I32, scores.dims)?, self.inner(data::I32, scores.dims)?];
        self.pointwise_to((mode::GEN_INDEX, data::F32, Some(2)), &[scores], row)?;
        self.pointwise_to((mode::GEN_INDEX, data::F32, Some(3)), &[scores], col)?;
        let seen = self.inner(data::BOOLEAN, scores.dims)?;
        self.pointwise_to((mode::CMP_GE, data::BOOLEAN, None), &[row, col], seen)?;
        let masked = self.value(ids::MASKED)?;
        let out = self.inner(data::F32, scores.dims)?;
        self.pointwise_to((mode::BINARY_SELECT, data::F32, None), &[scores, masked, seen], out)?;
        Ok(out)
    }

    /// The library's best plan for it that can be built.
    pub(super) fn plan(self) -> Result<Plan, CudaError> {
        let Self { library, tensors, ops, others, placed } = self;
        let handle = library.handle();
        let raws: Vec<Descriptor> = ops.iter().map(|op| op.raw).collect();
        let graph = library.descriptor(
            kind::OPERATIONGRAPH,
            &[
                (800, types::HANDLE, 1, (&raw const handle).cast()),
                (801, types::DESCRIPTOR, raws.len(), raws.as_ptr().cast()),
            ],
        )?;
        let (raw_graph, how) = (graph.raw, 3i32); // CUDNN_HEUR_MODE_A
        let heuristics = library.descriptor(
            kind::ENGINEHEUR,
            &[
                (201, types::DESCRIPTOR, 1, (&raw const raw_graph).cast()),
                (200, types::HEUR_MODE, 1, (&raw const how).cast()),
            ],
        )?;
        let configs = library.results(&heuristics)?;
        let mut last = CudaError::Refused {
            what: "attention",
            found: "a size that cuDNN has no kernel for".into(),
            needed: "another",
        };
        let mut kept: Vec<Owned> = tensors;
        kept.extend(others);
        kept.extend(ops);
        kept.push(graph);
        kept.push(heuristics);
        for config in configs {
            let raw_config = config.raw;
            let plan = library.descriptor(
                kind::EXECUTION_PLAN,
                &[
                    (400, types::HANDLE, 1, (&raw const handle).cast()),
                    (401, types::DESCRIPTOR, 1, (&raw const raw_config).cast()),
                ],
            );
            match plan {
                Err(error) => last = error,
                Ok(plan) => {
                    let workspace = library.workspace(&plan)?;
                    kept.push(config);
                    return Ok(Plan { plan, workspace, placed, _graph: kept });
                }
            }
        }
        Err(last)
    }
}
