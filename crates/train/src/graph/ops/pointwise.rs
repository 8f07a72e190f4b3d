//! Element by element: activations, dropout, and branches on their way back to the trunk.

use crate::graph::Val;
use crate::graph::build::{Builder, Keep};
use crate::graph::op::{Arg, Ctx, Made, Needs, Op, Reads, Saved, Site};
use crate::kernels::{Activation, Branch, Kernels, Rows};
use crate::stage::{StageError, Value};

struct Activate {
    activation: Activation,
    len: usize,
}

/// `activation(gate) up`.
struct Gate {
    activation: Activation,
    len: usize,
}

struct Residual {
    size: Rows,
    /// The first row here.
    first: u64,
    site: Site,
}

struct Dropped {
    size: Rows,
    first: u64,
    site: Site,
}

impl<K: Kernels> Builder<'_, '_, K> {
    pub fn activate(&mut self, x: Val, activation: Activation) -> Val {
        self.activated(x, activation, Keep::Always)
    }

    /// An activation that is computed again rather than kept.
    pub fn activate_again(&mut self, x: Val, activation: Activation) -> Val {
        self.activated(x, activation, Keep::Never)
    }

    fn activated(&mut self, x: Val, activation: Activation, keep: Keep) -> Val {
        let out = self.typed(x).clone();
        self.push(Activate { activation, len: out.len() }, &[x], out, keep)
    }

    /// `activation(gate) up`.
    pub fn gate(&mut self, gate: Val, up: Val, activation: Activation) -> Val {
        let out = self.typed(gate).clone();
        self.push(Gate { activation, len: out.len() }, &[gate, up], out, Keep::Always)
    }

    /// `trunk + dropped(branch)`. The branch comes to lie as the trunk does.
    pub fn residual(&mut self, trunk: Val, branch: Val, site: Site) -> Val {
        let out = self.typed(trunk).clone();
        let branch = self.want(branch, &out.lie);
        let op = Residual { size: out.size(), first: out.rows.start as u64, site };
        self.push(op, &[trunk, branch], out, Keep::Always)
    }

    pub fn dropout(&mut self, x: Val, site: Site) -> Val {
        if site.rate == 0.0 {
            return x;
        }
        let out = self.typed(x).clone();
        let op = Dropped { size: out.size(), first: out.rows.start as u64, site };
        self.push(op, &[x], out, Keep::Always)
    }
}

impl<K: Kernels> Op<K> for Activate {
    fn name(&self) -> &'static str {
        "activate"
    }

    fn needs(&self) -> Needs {
        Needs {
            backward: Reads { ins: vec![0], gradient: true, ..Reads::default() },
            backward_takes_gradient: true,
            ..Needs::default()
        }
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut y = ctx.kernels.buffer(self.len);
        ctx.kernels.activate(self.activation, ins[0].real(), &mut y);
        Ok(vec![Value::Real(y)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, mut saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let mut d = saved.gradient.take();
        ctx.kernels.activate_grad(self.activation, saved.ins[0].real(), &mut d);
        Ok(Made::one(d))
    }
}

impl<K: Kernels> Op<K> for Gate {
    fn name(&self) -> &'static str {
        "gate"
    }

    fn needs(&self) -> Needs {
        Needs {
            backward: Reads { ins: vec![0, 1], gradient: true, ..Reads::default() },
            backward_takes_gradient: true,
            ..Needs::default()
        }
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut y = ctx.kernels.buffer(self.len);
        ctx.kernels.gate(self.activation, ins[0].real(), ins[1].real(), &mut y);
        Ok(vec![Value::Real(y)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, mut saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let mut d_up = saved.gradient.take();
        let mut d_gate = ctx.kernels.buffer(self.len);
        let (gate, up) = (saved.ins[0].real(), saved.ins[1].real());
        ctx.kernels.gate_grad(self.activation, gate, up, &mut d_up, &mut d_gate);
        Ok(Made::several([d_gate, d_up]))
    }
}

/// The gradient of something dropped; a mask is its own gradient.
fn masked<K: Kernels>(ctx: &Ctx<'_, K>, site: Site, first: u64, size: Rows, x: &K::Buf) -> K::Buf {
    let mut y = ctx.kernels.buffer(size.len());
    match ctx.dropout(site, first, size.cols) {
        Some(dropout) => ctx.kernels.dropout(&dropout, x, &mut y),
        None => ctx.kernels.copy(x.into(), (&mut y).into(), size.len()),
    }
    y
}

impl<K: Kernels> Op<K> for Residual {
    fn name(&self) -> &'static str {
        "residual"
    }

    fn needs(&self) -> Needs {
        Needs { backward: Reads { gradient: true, ..Reads::default() }, ..Needs::default() }
    }

    fn passes_gradient(&self, input: usize) -> bool {
        input == 0 || self.site.rate == 0.0
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut y = ctx.kernels.buffer(self.size.len());
        let dropout = ctx.dropout(self.site, self.first, self.size.cols);
        let branch = Branch { x: ins[1].real(), bias: None, dropout };
        ctx.kernels.residual(self.size, ins[0].real(), branch, &mut y);
        Ok(vec![Value::Real(y)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let d = masked(ctx, self.site, self.first, self.size, saved.gradient.real());
        Ok(Made::second(d))
    }
}

impl<K: Kernels> Op<K> for Dropped {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn needs(&self) -> Needs {
        Needs { backward: Reads { gradient: true, ..Reads::default() }, ..Needs::default() }
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        Ok(vec![Value::Real(masked(ctx, self.site, self.first, self.size, ins[0].real()))])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        Ok(Made::one(masked(ctx, self.site, self.first, self.size, saved.gradient.real())))
    }
}
