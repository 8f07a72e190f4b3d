//! What a chain remembers of a microbatch between passes, and how that leaves for elsewhere and comes back.

use super::Chain;
use super::flow::Flow;
use crate::graph::{Elements, Frame, Item};
use crate::kernels::{Buffer, Kernels};
use crate::stage::{Microbatch, MicrobatchId, StageError, Value};
use crate::tier::Parcel;

/// What a chain remembers of a microbatch.
pub(super) struct Held<B> {
    pub(super) microbatch: Microbatch,
    pub(super) memory: Memory<B>,
    /// While it is elsewhere: how long everything in it was. Nothing is left here but its names.
    pub(super) away: Option<Vec<usize>>,
}

/// Calls a function with everything there is, always in the same order.
pub(super) type Each<'a, B> = dyn FnMut(&mut dyn FnMut(Item<'_, B>)) + 'a;

pub(super) enum Memory<B> {
    /// The inputs: the rest is computed again.
    Inputs(Flow<B>),
    /// For B: what each unit saved.
    Forward(Vec<Frame<B>>),
    /// The same, some or all of it in a file: the lengths of what is there, and where it is.
    Filed(Vec<(Frame<B>, Vec<usize>, Parcel)>),
    /// For W.
    Backward(Vec<Frame<B>>),
}

impl<K: Kernels> Chain<K> {
    pub(super) fn hold(&mut self, id: MicrobatchId, held: Held<K::Buf>) {
        self.held.insert(id, held);
        self.look();
    }

    /// Counts what is held now.
    pub(super) fn look(&mut self) {
        if let Some(strands) = &self.strands {
            let halves = [strands[0].0.live, strands[1].0.live];
            let live = &mut self.live;
            live.microbatches = halves[0].microbatches;
            live.bytes = halves.iter().map(|half| half.bytes).sum();
            live.peak_microbatches = halves[0].peak_microbatches;
            live.peak_bytes = live.peak_bytes.max(live.bytes);
            return;
        }
        let here = self.held.values().filter(|h| h.away.is_none());
        let waiting = here.filter(|h| !matches!(h.memory, Memory::Backward(_))).count();
        let live = &mut self.live;
        live.microbatches = self.held.len();
        live.bytes = self.held.values().map(|h| h.memory.elements().bytes::<K>()).sum();
        live.peak_microbatches = live.peak_microbatches.max(waiting);
        live.peak_bytes = live.peak_bytes.max(live.bytes);
    }

    /// Takes what a microbatch left for a pass, or says what is missing.
    pub(super) fn held_for(
        &mut self,
        id: MicrobatchId,
        pass: &'static str,
    ) -> Result<Held<K::Buf>, StageError> {
        let held = self.held.remove(&id);
        let wanted = match (&held, pass) {
            (Some(held), "LOAD") if held.away.is_none() => "evicted",
            (Some(held), "B" | "W" | "EVICT") if held.away.is_some() => "loaded",
            (_, "W") => "through B",
            _ => "forward",
        };
        let ready = |held: &Held<K::Buf>| {
            let made_b = matches!(held.memory, Memory::Backward(_));
            made_b == (pass == "W") && held.away.is_some() == (pass == "LOAD")
        };
        match held {
            Some(held) if ready(&held) => Ok(held),
            Some(held) => {
                self.held.insert(id, held);
                Err(StageError::NotThere { id, wanted, pass })
            }
            None => Err(StageError::NotThere { id, wanted, pass }),
        }
    }

    /// Moves what `each` goes through into bytes; and how long everything in it was.
    pub(super) fn pack(&self, each: &mut Each<'_, K::Buf>) -> (Vec<u8>, Vec<usize>) {
        let (mut bytes, mut lens) = (vec![], vec![]);
        each(&mut |item| match item {
            Item::Real(buf) => {
                lens.push(buf.len());
                let len = buf.len();
                match buf.is_wide() {
                    true => bytes
                        .extend_from_slice(bytemuck::cast_slice(&self.kernels.reals((&*buf).into(), len))),
                    false => bytes
                        .extend_from_slice(bytemuck::cast_slice(&self.kernels.elems((&*buf).into(), len))),
                }
                *buf = if buf.is_wide() { self.kernels.wide(0) } else { self.kernels.buffer(0) };
            }
            Item::Ids(ids) => {
                lens.push(ids.len());
                bytes.extend_from_slice(bytemuck::cast_slice(&std::mem::take(ids)));
            }
        });
        (bytes, lens)
    }

    /// Puts everything back to where it was moved from.
    pub(super) fn unpack(&self, each: &mut Each<'_, K::Buf>, mut bytes: &[u8], lens: &[usize]) {
        let mut lens = lens.iter().copied();
        let mut take = |element: usize| {
            let (head, rest) = bytes.split_at(lens.next().expect("a length for every item") * element);
            bytes = rest;
            head
        };
        each(&mut |item| match item {
            Item::Real(buf) => {
                if buf.is_wide() {
                    let values = values::<K::Real>(take(size_of::<K::Real>()));
                    *buf = self.kernels.wide(values.len());
                    self.kernels.put_reals(&values, buf.into());
                } else {
                    let values = values::<K::Elem>(take(size_of::<K::Elem>()));
                    *buf = self.kernels.buffer(values.len());
                    self.kernels.put_elems(&values, buf.into());
                }
            }
            Item::Ids(ids) => *ids = values(take(size_of::<i32>())),
        });
    }
}

impl<B: Buffer> Memory<B> {
    /// Calls `f` with everything in it, always in the same order.
    pub(super) fn each_mut(&mut self, f: &mut dyn FnMut(Item<'_, B>)) {
        match self {
            Memory::Inputs(flow) => flow.0.values_mut().for_each(|value| match value {
                Value::Real(buf) => f(Item::Real(buf)),
                Value::Ids(ids) => f(Item::Ids(ids)),
                Value::Loss(_) | Value::Coming(_) => {}
            }),
            Memory::Forward(saved) | Memory::Backward(saved) => saved.iter_mut().for_each(|s| s.each_mut(f)),
            Memory::Filed(filed) => filed.iter_mut().for_each(|(frame, ..)| frame.each_mut(f)),
        }
    }

    pub(super) fn elements(&self) -> Elements {
        match self {
            Memory::Inputs(flow) => flow.0.values().map(Elements::of).sum(),
            Memory::Forward(saved) | Memory::Backward(saved) => saved.iter().map(Frame::elements).sum(),
            Memory::Filed(filed) => filed.iter().map(|(frame, ..)| frame.elements()).sum(),
        }
    }
}

/// Numbers from their bytes, which may lie anywhere.
fn values<P: bytemuck::Pod + Default>(bytes: &[u8]) -> Vec<P> {
    let mut values = vec![P::default(); bytes.len() / size_of::<P>()];
    bytemuck::cast_slice_mut(&mut values).copy_from_slice(bytes);
    values
}
