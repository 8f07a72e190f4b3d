//! A pass in two strands: each takes half of a microbatch's samples, and computes while the other waits for ranks along `tp`.

use super::Chain;
use super::flow::check;
use crate::flat::{Flat, FlatMut, Gradients, Weights};
use crate::kernels::{BufSlice, Buffer, Kernels, PartMut};
use crate::runtime::{add_waited, take_waited};
use crate::stage::{Microbatch, MicrobatchId, Stage as _, StageError, Value};
use crate::strands::{Turn, both};

/// Gradients to which another strand adds behind this one.
pub(super) struct Unclosed<'a, B>(pub(super) &'a mut dyn Gradients<B>);

impl<B> Gradients<B> for Unclosed<'_, B> {
    fn open(&mut self, unit: usize) -> FlatMut<'_, B> {
        self.0.open(unit)
    }

    fn close(&mut self, _: usize) -> Result<(), StageError> {
        Ok(())
    }
}

/// How a pass runs in two strands.
impl<K: Kernels> Chain<K> {
    pub(super) fn forward_in_strands(
        &mut self,
        microbatch: Microbatch,
        weights: &mut dyn Weights<K::Buf>,
        inputs: Vec<Value<K::Buf>>,
    ) -> Result<Vec<Value<K::Buf>>, StageError> {
        for ((port, classes), value) in self.parts.inputs.iter().zip(&self.parts.classes).zip(&inputs) {
            check(port, *classes, value, self.setup.place.coord())?;
        }
        let own = self.setup.own_samples();
        let inputs = self.halves(inputs);
        let [first, second] = &mut **self.strands.as_mut().expect("it runs in strands");
        // A half begins where its samples do among all of the microbatch.
        let of = |half: usize, chain: &Chain<K>| {
            let inner = chain.setup.own_samples();
            let skipped = (own.start + half * inner.len() - inner.start) as u64;
            Microbatch { first_sample: microbatch.first_sample + skipped, ..microbatch }
        };
        let abouts = [of(0, &first.0), of(1, &second.0)];
        let Flat::Whole(params) = weights.fetch(0, None)? else { return Err(StageError::Strands) };
        let [a, b] = inputs;
        let jobs = [
            ((&mut first.0, abouts[0], a), first.1.clone()),
            ((&mut second.0, abouts[1], b), second.1.clone()),
        ];
        let outputs = turns(jobs, |(chain, about, inputs)| chain.forward(about, &mut &*params, inputs))?;
        weights.done();
        self.look();
        Ok(self.joined(outputs))
    }

    pub(super) fn backward_in_strands(
        &mut self,
        id: MicrobatchId,
        weights: &mut dyn Weights<K::Buf>,
        grads: Vec<K::Buf>,
    ) -> Result<Vec<K::Buf>, StageError> {
        let [a, b] = self.halves(grads.into_iter().map(Value::Real).collect());
        let reals = |half: Vec<Value<K::Buf>>| -> Vec<K::Buf> {
            let real = |value| match value {
                Value::Real(buf) => buf,
                other => unreachable!("{other:?} is no gradient"),
            };
            half.into_iter().map(real).collect()
        };
        let Flat::Whole(params) = weights.fetch(0, None)? else { return Err(StageError::Strands) };
        let [first, second] = &mut **self.strands.as_mut().expect("it runs in strands");
        let jobs =
            [((&mut first.0, reals(a)), first.1.clone()), ((&mut second.0, reals(b)), second.1.clone())];
        let made = turns(jobs, |(chain, grads)| chain.backward_input(id, &mut &*params, grads))?;
        weights.done();
        self.look();
        let joined = self.joined(made.map(|half| half.into_iter().map(Value::Real).collect()));
        Ok(reals(joined))
    }

    /// The first samples and the last ones: rows lie sample by sample.
    fn halves(&self, values: Vec<Value<K::Buf>>) -> [Vec<Value<K::Buf>>; 2] {
        let mut halves = [vec![], vec![]];
        for value in values {
            for (i, half) in halves.iter_mut().enumerate() {
                half.push(match &value {
                    Value::Real(buf) => {
                        let len = buf.len() / 2;
                        let mut part = self.kernels.buffer(len);
                        self.kernels.copy(BufSlice { buf, start: i * len }, (&mut part).into(), len);
                        Value::Real(part)
                    }
                    Value::Ids(ids) => Value::Ids(ids[i * ids.len() / 2..][..ids.len() / 2].to_vec()),
                    Value::Loss(loss) => Value::Loss(*loss),
                    Value::Coming(_) => unreachable!("what enters a stage is there"),
                });
            }
        }
        halves
    }

    fn joined(&self, [first, second]: [Vec<Value<K::Buf>>; 2]) -> Vec<Value<K::Buf>> {
        let join = |(a, b): (Value<K::Buf>, Value<K::Buf>)| match (a, b) {
            (Value::Real(a), Value::Real(b)) => {
                let mut both = self.kernels.buffer(a.len() + b.len());
                self.kernels.copy((&a).into(), (&mut both).into(), a.len());
                self.kernels.copy((&b).into(), PartMut { buf: &mut both, start: a.len() }, b.len());
                Value::Real(both)
            }
            (Value::Loss(a), Value::Loss(b)) => Value::Loss(a + b),
            (Value::Ids(a), Value::Ids(b)) => Value::Ids([a, b].concat()),
            (a, b) => unreachable!("{a:?} beside {b:?}"),
        };
        first.into_iter().zip(second).map(join).collect()
    }
}

/// Runs two strands, and counts as standing still what neither of them computed.
fn turns<S: Send, R: Send>(
    strands: [(S, Turn); 2],
    f: impl Fn(S) -> Result<R, StageError> + Sync,
) -> Result<[R; 2], StageError> {
    let before = take_waited();
    let ([first, second], idle) = both(strands, f);
    take_waited();
    add_waited(before + idle);
    Ok([first?, second?])
}
