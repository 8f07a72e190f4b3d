//! The passes of a chain: F, B and W over its units, one behind the other.

use super::Chain;
use super::flow::{Flow, check};
use super::halves::Unclosed;
use super::held::{Held, Memory};
use crate::flat::{Buckets, Flat, Gradients, Weights};
use crate::graph::{Ctx, Frame, Mode, Unit};
use crate::kernels::Kernels;
use crate::parameter::Parameter;
use crate::stage::{
    ActivationBytes, Live, Microbatch, MicrobatchId, Port, Recompute, Role, Stage, StageError, Value,
};

impl<K: Kernels> Chain<K> {
    fn ctx<'a>(&'a self, microbatch: Microbatch, params: Option<Flat<'a, K::Buf>>, mode: Mode) -> Ctx<'a, K> {
        let first_sample = microbatch.first_sample + self.setup.own_samples().start as u64;
        Ctx {
            kernels: &self.kernels,
            groups: &self.groups,
            params,
            microbatch,
            first_sample,
            seed: self.setup.seed,
            mode,
            cache: None,
        }
    }

    /// Inputs by name, checked against their ports.
    fn flow(&self, inputs: Vec<Value<K::Buf>>) -> Result<Flow<K::Buf>, StageError> {
        if inputs.len() != self.parts.inputs.len() {
            let (given, wanted) = (inputs.len(), self.parts.inputs.len());
            return Err(StageError::Count { what: "inputs", given, wanted });
        }
        let mut flow = Flow::default();
        for ((port, classes), value) in self.parts.inputs.iter().zip(&self.parts.classes).zip(inputs) {
            check(port, *classes, &value, self.setup.place.coord())?;
            flow.put(&port.name, value);
        }
        Ok(flow)
    }

    /// Runs all units forward; `keep` gets what each of them saved.
    fn run(
        &self,
        microbatch: Microbatch,
        weights: &mut dyn Weights<K::Buf>,
        mode: Mode,
        flow: &mut Flow<K::Buf>,
        mut keep: impl FnMut(&Unit<K>, Frame<K::Buf>) -> Result<(), StageError>,
    ) -> Result<(), StageError> {
        let units = &self.parts.units;
        for (i, unit) in units.iter().enumerate() {
            let params = weights.fetch(i, (i + 1 < units.len()).then_some(i + 1))?;
            keep(unit, unit.forward(&self.ctx(microbatch, Some(params), mode), flow)?)?;
        }
        weights.done();
        Ok(())
    }

    /// The same, for a B that follows.
    fn run_to_learn(
        &self,
        microbatch: Microbatch,
        weights: &mut dyn Weights<K::Buf>,
        flow: &mut Flow<K::Buf>,
    ) -> Result<Vec<Frame<K::Buf>>, StageError> {
        let mut saved = Vec::with_capacity(self.parts.units.len());
        self.run(microbatch, weights, Mode::Train, flow, |_, frame| {
            saved.push(frame);
            Ok(())
        })?;
        Ok(saved)
    }

    fn outputs_of(&self, flow: &mut Flow<K::Buf>) -> Result<Vec<Value<K::Buf>>, StageError> {
        flow.settle(&*self.kernels)?;
        let take =
            |port: &Port| flow.take(&port.name).unwrap_or_else(|| panic!("no unit gives `{}`", port.name));
        Ok(self.parts.outputs.iter().map(take).collect())
    }

    /// A second set of inputs, to start from again.
    fn copy(&self, flow: &Flow<K::Buf>) -> Flow<K::Buf> {
        let copy = |value: &Value<K::Buf>| match value {
            Value::Real(buf) => Value::Real(self.kernels.clone_of(buf)),
            Value::Ids(ids) => Value::Ids(ids.clone()),
            Value::Loss(loss) => Value::Loss(*loss),
            Value::Coming(_) => unreachable!("a stage's inputs are there"),
        };
        Flow(flow.0.iter().map(|(name, value)| (name.clone(), copy(value))).collect())
    }

    /// Gradients of the outputs by name, checked against their ports.
    fn grads_flow(&self, grads: Vec<K::Buf>) -> Result<Flow<K::Buf>, StageError> {
        let ports: Vec<&Port> = self.parts.outputs.iter().filter(|p| p.role == Role::Activation).collect();
        if grads.len() != ports.len() {
            let (given, wanted) = (grads.len(), ports.len());
            return Err(StageError::Count { what: "gradients", given, wanted });
        }
        let mut flow = Flow::default();
        for (port, grad) in ports.into_iter().zip(grads) {
            let value = Value::Real(grad);
            check(port, None, &value, self.setup.place.coord())?;
            flow.put(&port.name, value);
        }
        Ok(flow)
    }
}

impl<K: Kernels> Stage for Chain<K> {
    type Buf = K::Buf;

    fn inputs(&self) -> &[Port] {
        &self.parts.inputs
    }

    fn outputs(&self) -> &[Port] {
        &self.parts.outputs
    }

    fn parameters(&self) -> &[Parameter] {
        &self.parts.parameters
    }

    fn buckets(&self) -> &Buckets {
        &self.parts.buckets
    }

    fn forward(
        &mut self,
        microbatch: Microbatch,
        weights: &mut dyn Weights<K::Buf>,
        inputs: Vec<Value<K::Buf>>,
    ) -> Result<Vec<Value<K::Buf>>, StageError> {
        if self.held.contains_key(&microbatch.id) {
            return Err(StageError::Twice { id: microbatch.id });
        }
        if self.strands.is_some() {
            return self.forward_in_strands(microbatch, weights, inputs);
        }
        let mut flow = self.flow(inputs)?;
        let again = self.setup.recompute == Recompute::Everything;
        let memory = match &self.tier {
            _ if again => {
                let kept = self.copy(&flow);
                self.run(microbatch, weights, Mode::Train, &mut flow, |_, _| Ok(()))?;
                Memory::Inputs(kept)
            }
            None => Memory::Forward(self.run_to_learn(microbatch, weights, &mut flow)?),
            Some(tier) => {
                let mut filed = Vec::with_capacity(self.parts.units.len());
                self.run(microbatch, weights, Mode::Train, &mut flow, |unit, mut frame| {
                    let (bytes, lens) = self.pack(&mut |f| unit.each_filed(&mut frame, f));
                    filed.push((frame, lens, tier.put(bytes)?));
                    Ok(())
                })?;
                Memory::Filed(filed)
            }
        };
        let outputs = self.outputs_of(&mut flow)?;
        self.hold(microbatch.id, Held { microbatch, memory, away: None });
        Ok(outputs)
    }

    fn evaluate(
        &mut self,
        microbatch: Microbatch,
        weights: &mut dyn Weights<K::Buf>,
        inputs: Vec<Value<K::Buf>>,
    ) -> Result<Vec<Value<K::Buf>>, StageError> {
        let mut flow = self.flow(inputs)?;
        self.run(microbatch, weights, Mode::Evaluate, &mut flow, |_, _| Ok(()))?;
        self.outputs_of(&mut flow)
    }

    fn backward_input(
        &mut self,
        id: MicrobatchId,
        weights: &mut dyn Weights<K::Buf>,
        grads: Vec<K::Buf>,
    ) -> Result<Vec<K::Buf>, StageError> {
        if self.strands.is_some() {
            return self.backward_in_strands(id, weights, grads);
        }
        let Held { microbatch, memory, .. } = self.held_for(id, "B")?;
        let (mut saved, mut filed) = match memory {
            Memory::Inputs(mut flow) => (self.run_to_learn(microbatch, weights, &mut flow)?, vec![]),
            Memory::Forward(saved) | Memory::Backward(saved) => (saved, vec![]),
            Memory::Filed(filed) => {
                let parts = filed.into_iter().map(|(frame, lens, parcel)| (frame, (lens, parcel)));
                parts.unzip()
            }
        };
        // One unit's is read while the one behind it computes.
        let mut fetch = || {
            let (lens, parcel) = filed.pop()?;
            Some((lens, self.tier.as_ref()?.fetch(parcel)))
        };
        let mut coming = fetch();
        let mut flow = self.grads_flow(grads)?;
        for (i, (unit, saved)) in self.parts.units.iter().zip(&mut saved).enumerate().rev() {
            if let Some((lens, bytes)) = std::mem::take(&mut coming) {
                let bytes = bytes.wait()?;
                coming = fetch();
                self.unpack(&mut |f| unit.each_filed(saved, f), &bytes, &lens);
            }
            let params = weights.fetch(i, i.checked_sub(1))?;
            unit.backward_input(&self.ctx(microbatch, Some(params), Mode::Train), &mut flow, saved)?;
        }
        weights.done();
        flow.settle(&*self.kernels)?;
        let activations = self.parts.inputs.iter().filter(|p| p.role == Role::Activation);
        let grads = activations.map(|p| flow.take_real(&p.name)).collect();
        self.hold(id, Held { microbatch, memory: Memory::Backward(saved), away: None });
        Ok(grads)
    }

    fn backward_weight(
        &mut self,
        id: MicrobatchId,
        grads: &mut dyn Gradients<K::Buf>,
    ) -> Result<(), StageError> {
        if let Some(strands) = &mut self.strands {
            let [first, second] = &mut **strands;
            first.0.backward_weight(id, &mut Unclosed(grads))?;
            second.0.backward_weight(id, grads)?;
            self.look();
            return Ok(());
        }
        let Held { microbatch, memory, .. } = self.held_for(id, "W")?;
        let Memory::Backward(mut saved) = memory else { unreachable!("held_for checked it") };
        let ctx = self.ctx(microbatch, None, Mode::Train);
        for (i, unit) in self.parts.units.iter().enumerate().rev() {
            unit.backward_weight(&ctx, &mut saved[i], &mut grads.open(i))?;
            // A tied weight belongs to the first unit that uses it, and that one comes last.
            grads.close(i)?;
        }
        self.look();
        Ok(())
    }

    fn evict(&mut self, id: MicrobatchId) -> Result<Vec<u8>, StageError> {
        if let Some(strands) = &mut self.strands {
            let halves = strands.iter_mut().map(|(chain, _)| chain.evict(id));
            let bytes = halves.collect::<Result<Vec<_>, _>>()?.concat();
            self.look();
            return Ok(bytes);
        }
        let Held { microbatch, mut memory, .. } = self.held_for(id, "EVICT")?;
        let (bytes, lens) = self.pack(&mut |f| memory.each_mut(f));
        self.hold(id, Held { microbatch, memory, away: Some(lens) });
        Ok(bytes)
    }

    fn load(&mut self, id: MicrobatchId, bytes: &[u8]) -> Result<(), StageError> {
        if let Some(strands) = &mut self.strands {
            let mut rest = bytes;
            for (chain, _) in &mut **strands {
                chain.load(id, rest)?;
                rest = &rest[chain.activation_bytes().after_forward as usize..];
            }
            self.look();
            return Ok(());
        }
        let mut held = self.held_for(id, "LOAD")?;
        let wanted = self.activation_bytes().after_forward as usize;
        if bytes.len() < wanted {
            self.hold(id, held);
            return Err(StageError::Evicted { id, given: bytes.len() });
        }
        let lens = held.away.take().unwrap_or_default();
        self.unpack(&mut |f| held.memory.each_mut(f), bytes, &lens);
        self.hold(id, held);
        Ok(())
    }

    fn forget(&mut self, id: MicrobatchId) {
        if let Some(strands) = &mut self.strands {
            strands.iter_mut().for_each(|(chain, _)| chain.forget(id));
        }
        if let (Some(tier), Some(Held { memory: Memory::Filed(filed), .. })) =
            (&self.tier, self.held.remove(&id))
        {
            filed.into_iter().for_each(|(_, _, parcel)| tier.discard(parcel));
        }
        self.look();
    }

    fn activation_bytes(&self) -> ActivationBytes {
        match &self.strands {
            None => self.parts.activation_bytes(&self.setup),
            Some(strands) => strands[0].0.activation_bytes().twice(),
        }
    }

    fn live(&self) -> Live {
        self.live
    }
}
