//! Models as graphs of ops: a layer is described once, and its passes follow from that.
//!
//! A unit of a model is a list of ops in SSA form, put together by a [`Builder`]. Every value says how it lies over the ranks that
//! compute it together, and how its gradient does ([`Typed`]); where an op wants a value otherwise than it is, the builder
//! puts a reshard between them. [`mod@derive`] makes the lists of the passes F, B and W, and from what they read
//! follows what a unit keeps of a microbatch:
//!
//! ```text
//!  x -+-> norm -> [reshard] -> linear -> activate -> linear -> [reshard] -+-> y        what is written down
//!     +------------------------------------------------------------------+
//!
//!  F   norm, reshard, linear, activate, linear, reshard, add                           what follows from it
//!  B   linear', activate', linear', reshard', norm' + dy
//!  W   linear'', linear'', norm''
//!  kept  F..B  x, stats, normed, hidden, active      B..W  normed, d_hidden, active, dy, sums
//! ```

pub(crate) mod budget;
mod build;
mod derive;
pub(crate) mod lists;
mod op;
pub mod ops;
pub(crate) mod policy;
mod unit;

#[cfg(test)]
mod tests;

pub use build::{Builder, Team, TeamAxis};
pub use op::{Cache, Cost, Ctx, Mode, Site};
pub use policy::{Action, Policies, Rule};
pub use unit::{Elements, Frame, Item, Remembered, Unit};

/// How a value lies over the ranks of one axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Spread {
    /// Every rank has all of it.
    Whole,
    /// Every rank has some of the rows.
    Rows,
    /// Every rank has some of the columns.
    Columns,
    /// Every rank has a summand of it.
    Summand,
}

impl Spread {
    /// How the gradient lies of a value that lies so, if whoever uses it computes all of its gradient.
    pub fn of_gradient(self) -> Spread {
        match self {
            Spread::Summand => Spread::Whole,
            other => other,
        }
    }
}

/// How a value lies over the ranks of every axis, and how its gradient does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lie {
    pub value: Vec<Spread>,
    pub gradient: Vec<Spread>,
}

impl Lie {
    /// The gradient lies as the value's own spread asks for.
    pub fn of(value: Vec<Spread>) -> Self {
        let gradient = value.iter().map(|s| s.of_gradient()).collect();
        Self { value, gradient }
    }

    /// With another spread along one axis.
    pub fn along(&self, axis: Axis, spread: Spread) -> Self {
        let mut lie = self.clone();
        (lie.value[axis.0], lie.gradient[axis.0]) = (spread, spread.of_gradient());
        lie
    }

    /// Whole along an axis, but whoever uses it has only summands of its gradient: the way into a region where every rank computes a
    /// part.
    pub fn entering(&self, axis: Axis) -> Self {
        let mut lie = self.clone();
        (lie.value[axis.0], lie.gradient[axis.0]) = (Spread::Whole, Spread::Summand);
        lie
    }
}

/// An axis along which ranks compute a pass together, by its place among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Axis(pub usize);

/// What a value is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Real,
    Ids,
    Loss,
}

/// A value of a graph, as one rank sees it: a matrix, row-major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Typed {
    pub kind: Kind,
    /// Rows where they are not split: all those of this rank's samples.
    pub all_rows: usize,
    /// Columns on this rank.
    pub cols: usize,
    pub lie: Lie,
    /// The rows that are here.
    pub rows: std::ops::Range<usize>,
}

impl Typed {
    pub fn len(&self) -> usize {
        self.rows.len() * self.cols
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Here, as a matrix.
    pub fn size(&self) -> crate::kernels::Rows {
        crate::kernels::Rows { rows: self.rows.len(), cols: self.cols }
    }

    /// The axis along which its rows, or columns, are split.
    pub fn split(&self, spread: Spread) -> Option<Axis> {
        self.lie.value.iter().position(|&s| s == spread).map(Axis)
    }
}

/// A value of a graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Val(u32);

impl Val {
    fn index(self) -> usize {
        self.0 as usize
    }
}
