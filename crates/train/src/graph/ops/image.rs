//! What a U-Net needs beside convolutions: larger images, skips joined in, time steps.

use crate::graph::build::{Builder, Keep};
use crate::graph::op::{Arg, Ctx, Made, Needs, Op, Reads, Saved};
use crate::graph::ops::conv::Grid;
use crate::graph::{Kind, Typed, Val};
use crate::kernels::{Images, Kernels, Rows};
use crate::stage::{StageError, Value};

/// Every pixel twice in both directions; made again rather than kept, being four times as large.
struct Upsample {
    from: Images,
}

/// `[a | b]`, row by row.
struct Concat {
    rows: usize,
    cols: [usize; 2],
}

/// A row a sample, added to all of the sample's pixels.
struct AddPerSample {
    pixels: usize,
    size: Rows,
}

/// Sines and cosines of time steps.
struct TimeWaves {
    dim: usize,
    rows: usize,
}

impl<K: Kernels> Builder<'_, '_, K> {
    /// Images of twice the size, from those of `grid`.
    pub fn upsample(&mut self, x: Val, grid: Grid) -> Val {
        let typed = self.typed(x).clone();
        let Grid { samples, height, width } = grid;
        let from = Images { samples, height, width, channels: typed.cols };
        let rows = 4 * typed.all_rows;
        self.push(Upsample { from }, &[x], Typed { all_rows: rows, rows: 0..rows, ..typed }, Keep::Never)
    }

    pub fn concat(&mut self, a: Val, b: Val) -> Val {
        let typed = self.typed(a).clone();
        let cols = [typed.cols, self.typed(b).cols];
        let op = Concat { rows: typed.rows.len(), cols };
        self.push(op, &[a, b], Typed { cols: cols[0] + cols[1], ..typed }, Keep::Always)
    }

    /// Adds to every one of a sample's `pixels` its row of `each`.
    pub fn add_per_sample(&mut self, x: Val, each: Val, pixels: usize) -> Val {
        let out = self.typed(x).clone();
        self.push(AddPerSample { pixels, size: out.size() }, &[x, each], out, Keep::Always)
    }

    pub fn time_waves(&mut self, steps: Val, dim: usize) -> Val {
        let typed = self.typed(steps).clone();
        let op = TimeWaves { dim, rows: typed.rows.len() };
        self.push(op, &[steps], Typed { kind: Kind::Real, cols: dim, ..typed }, Keep::Never)
    }
}

fn gradient_alone() -> Needs {
    Needs { backward: Reads { gradient: true, ..Reads::default() }, ..Needs::default() }
}

impl<K: Kernels> Op<K> for Upsample {
    fn name(&self) -> &'static str {
        "upsample"
    }

    fn needs(&self) -> Needs {
        gradient_alone()
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut large = ctx.kernels.buffer(4 * self.from.len());
        ctx.kernels.upsample(self.from, ins[0].real(), &mut large);
        Ok(vec![Value::Real(large)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let mut dx = ctx.kernels.buffer(self.from.len());
        ctx.kernels.upsample_grad(self.from, saved.gradient.real(), &mut dx);
        Ok(Made::one(dx))
    }
}

impl<K: Kernels> Op<K> for Concat {
    fn name(&self) -> &'static str {
        "concat"
    }

    fn needs(&self) -> Needs {
        gradient_alone()
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let [a, b] = self.cols;
        let mut y = ctx.kernels.buffer(self.rows * (a + b));
        ctx.kernels.concat((ins[0].real(), a), (ins[1].real(), b), &mut y);
        Ok(vec![Value::Real(y)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let [a, b] = self.cols;
        let mut parts = [a, b].map(|cols| ctx.kernels.buffer(self.rows * cols));
        let [da, db] = &mut parts;
        ctx.kernels.split(saved.gradient.real(), (da, a), (db, b));
        Ok(Made::several(parts))
    }
}

impl<K: Kernels> Op<K> for AddPerSample {
    fn name(&self) -> &'static str {
        "add per sample"
    }

    fn needs(&self) -> Needs {
        Needs { forward_takes: Some(0), ..gradient_alone() }
    }

    fn passes_gradient(&self, input: usize) -> bool {
        input == 0
    }

    fn forward(
        &self,
        ctx: &Ctx<'_, K>,
        mut ins: Vec<Arg<'_, K::Buf>>,
    ) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut x = ins[0].take();
        ctx.kernels.add_per_sample(self.pixels, self.size, ins[1].real(), &mut x);
        Ok(vec![Value::Real(x)])
    }

    fn backward(&self, ctx: &Ctx<'_, K>, saved: Saved<'_, K::Buf>) -> Result<Made<K::Buf>, StageError> {
        let mut each = ctx.kernels.buffer(self.size.rows / self.pixels * self.size.cols);
        ctx.kernels.add_per_sample_grad(self.pixels, self.size, saved.gradient.real(), &mut each);
        Ok(Made::second(each))
    }
}

impl<K: Kernels> Op<K> for TimeWaves {
    fn name(&self) -> &'static str {
        "time waves"
    }

    fn needs(&self) -> Needs {
        Needs::default()
    }

    fn forward(&self, ctx: &Ctx<'_, K>, ins: Vec<Arg<'_, K::Buf>>) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut waves = ctx.kernels.buffer(self.rows * self.dim);
        ctx.kernels.time_waves(ins[0].ids(), self.dim, &mut waves);
        Ok(vec![Value::Real(waves)])
    }
}
