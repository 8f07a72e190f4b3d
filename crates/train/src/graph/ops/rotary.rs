//! Rotary positions: the columns of every head, turned by the position of their row.

use std::sync::{Arc, LazyLock};

use crate::graph::Val;
use crate::graph::build::{Builder, Keep};
use crate::graph::op::{Arg, Ctx, Made, Needs, Op, Reads, Saved};
use crate::kernels::{Kernels, Rotary, Rows};
use crate::stage::{StageError, Value};

/// Angles for all positions: one table for all layers, made when the first of them turns something.
pub type Turns = Arc<LazyLock<Rotary, Box<dyn FnOnce() -> Rotary + Send + Sync>>>;

struct Turn {
    turns: Turns,
    size: Rows,
}

impl<K: Kernels> Builder<'_, '_, K> {
    /// Turns heads in place. Part of the insides of attention.
    pub fn rotate(&mut self, x: Val, turns: &Turns) -> Val {
        let out = self.typed(x).clone();
        let op = Turn { turns: Arc::clone(turns), size: out.size() };
        self.push(op, &[x], out, Keep::Attention)
    }
}

impl<K: Kernels> Op<K> for Turn {
    fn name(&self) -> &'static str {
        "rotate"
    }

    fn needs(&self) -> Needs {
        Needs {
            backward: Reads { gradient: true, ..Reads::default() },
            forward_takes: Some(0),
            backward_takes_gradient: true,
            ..Needs::default()
        }
    }

    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        mut ins: Vec<Arg<'_, K::Buf>>,
    ) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut x = ins[0].take();
        ctx.kernels.rotate(&self.turns, ctx.first_position(), self.size, false, &mut x);
        Ok(vec![Value::Real(x)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, mut saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let mut d = saved.gradient.take();
        ctx.kernels.rotate(&self.turns, 0, self.size, true, &mut d);
        Ok(Made::one(d))
    }
}
