//! Boxes in memory, as streams of bytes: what is sent, received and copied.

use std::io::{self, IoSlice, IoSliceMut};
use std::ops::Range;
#[cfg(feature = "mpi")]
use std::ptr::NonNull;
use std::sync::Arc;

use super::Memory;
use crate::checksum;
use crate::combine::Combine;
use crate::view::View;

/// What a peer has written is combined in pieces that stay in a core's first cache, and end with an element.
const BOUNCE_BYTES: usize = 8 << 10;

/// A box in some memory.
#[derive(Debug, Clone)]
pub struct Place {
    pub memory: Arc<Memory>,
    pub view: View,
}

impl Place {
    pub fn bytes(&self) -> u64 {
        self.view.bytes()
    }
}

/// A place whose bytes may be touched.
#[derive(Debug, Clone)]
#[repr(transparent)]
pub struct Lent(Place);

impl Lent {
    /// # Safety
    /// While the value or a copy of it lives, whoever holds it has the place's bytes: nobody else in this process writes to
    /// them, and where anything is written through it, nobody else reads them. All that is made of one memory is used by one
    /// thread at a time. An engine has this of a memory that it holds a lease of, for a program that was verified.
    pub(crate) unsafe fn of(place: &Place) -> &Self {
        let place: *const Place = place;
        // SAFETY: it is the same value in another type, by `repr(transparent)`.
        unsafe { &*place.cast::<Self>() }
    }

    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.0.memory
    }

    pub(crate) fn view(&self) -> &View {
        &self.0.view
    }

    /// The slices of a part of the stream, to write from; as many as there is room for. Returns how many bytes.
    pub(crate) fn slices<'a>(&'a self, part: Range<u64>, room: usize, out: &mut Vec<IoSlice<'a>>) -> u64 {
        let mut bytes = 0;
        for run in self.0.view.runs(part).take(room) {
            // SAFETY: see `Lent::of`; the slice ends with the borrow.
            out.push(IoSlice::new(unsafe { self.0.memory.slice(run) }));
            bytes += run.1;
        }
        bytes
    }

    /// The same to read into.
    pub(crate) fn slices_mut<'a>(
        &'a self,
        part: Range<u64>,
        room: usize,
        out: &mut Vec<IoSliceMut<'a>>,
    ) -> u64 {
        let mut bytes = 0;
        for run in self.0.view.runs(part).take(room) {
            // SAFETY: see `Lent::of`; runs of a view do not overlap.
            out.push(IoSliceMut::new(unsafe { self.0.memory.slice_mut(run) }));
            bytes += run.1;
        }
        bytes
    }

    /// Where a part of the stream lies, if it is one run of bytes. Whoever reads or writes there keeps to what
    /// [`Lent::of`] asks for, and keeps the memory.
    #[cfg(feature = "mpi")]
    pub(crate) fn in_one_run(&self, part: Range<u64>) -> Option<NonNull<[u8]>> {
        if self.gpu().is_some() {
            return None;
        }
        let bytes = part.end - part.start;
        let run = self.0.view.runs(part).next().filter(|run| run.1 == bytes)?;
        // SAFETY: see `Lent::of`; only its address is kept.
        Some(NonNull::from(unsafe { self.0.memory.slice_mut(run) }))
    }

    /// Continues a checksum over a part of the stream.
    pub(crate) fn checksum(&self, part: Range<u64>, so_far: u32) -> u32 {
        // SAFETY: see `Lent::of`.
        let bytes = |run| unsafe { self.0.memory.slice(run) };
        self.0.view.runs(part).fold(so_far, |crc, run| checksum::append(crc, bytes(run)))
    }

    /// Appends a part of the stream. From a device, this waits for it.
    pub(crate) fn pack(&self, part: Range<u64>, out: &mut Vec<u8>) -> io::Result<()> {
        if self.gpu().is_some() {
            // SAFETY: see `Lent::of`.
            return unsafe { self.0.memory.pack_from_device(&self.0.view, part, out) };
        }
        for run in self.0.view.runs(part) {
            // SAFETY: see `Lent::of`.
            out.extend_from_slice(unsafe { self.0.memory.slice(run) });
        }
        Ok(())
    }

    /// Reads a part of the stream, of memory of the host.
    pub(crate) fn read(&self, part: Range<u64>, mut out: &mut [u8]) {
        for run in self.0.view.runs(part) {
            let (head, rest) = out.split_at_mut(run.1 as usize);
            // SAFETY: see `Lent::of`; `head` is as long as the run, and ours.
            unsafe { self.0.memory.copy_out(run.0, head.as_mut_ptr(), run.1) };
            out = rest;
        }
    }

    /// Puts bytes at `offset` of the stream, or combines them with what is there. Onto a device, this waits for it.
    pub(crate) fn unpack(&self, offset: u64, mut bytes: &[u8], combine: Option<Combine>) -> io::Result<()> {
        if self.gpu().is_some() {
            // SAFETY: see `Lent::of`.
            return unsafe { self.0.memory.unpack_to_device(&self.0.view, offset, bytes, combine) };
        }
        for run in self.0.view.runs(offset..offset + bytes.len() as u64) {
            let (head, rest) = bytes.split_at(run.1 as usize);
            // SAFETY: see `Lent::of`.
            put(unsafe { self.0.memory.slice_mut(run) }, head, combine);
            bytes = rest;
        }
        Ok(())
    }

    /// Copies a part of this place's stream out of a peer's segment, where the whole of it is one run of bytes from `start` on.
    pub(crate) fn copy_from_peer(
        &self,
        from: &Memory,
        start: u64,
        part: Range<u64>,
        combine: Option<Combine>,
    ) {
        assert!(!from.writable, "what is copied without being lent is a peer's");
        let mut at = start + part.start;
        for run in self.0.view.runs(part) {
            // SAFETY: see `Lent::of`; nobody in this process writes to a peer's segment, which is another mapping than ours.
            unsafe { put_copied(self.0.memory.slice_mut(run), from, at, combine) };
            at += run.1;
        }
    }

    /// Copies a part of another place's stream to the same part of this one's. The two do not overlap in memory, and both are the host's.
    pub(crate) fn copy_from(&self, from: &Lent, part: Range<u64>, combine: Option<Combine>) {
        let (mut source, mut target) = (from.0.view.runs(part.clone()), self.0.view.runs(part));
        let (mut have, mut want) = (source.next(), target.next());
        while let (Some(a), Some(b)) = (have, want) {
            let len = a.1.min(b.1);
            let apart = !Arc::ptr_eq(&self.0.memory, &from.0.memory) || a.0 + len <= b.0 || b.0 + len <= a.0;
            assert!(apart, "bytes {}..+{len} are copied onto {}", a.0, b.0);
            // SAFETY: see `Lent::of`, and the two do not overlap.
            unsafe { put_copied(self.0.memory.slice_mut((b.0, len)), &from.0.memory, a.0, combine) };
            let rest = |run: (u64, u64)| (run.1 > len).then_some((run.0 + len, run.1 - len));
            have = rest(a).or_else(|| source.next());
            want = rest(b).or_else(|| target.next());
        }
    }
}

/// Whole places, each one run of bytes, that are copied out of a peer's segments; those that lie side by side there and here, in one go. A
/// long copy does not read what it is about to overwrite, and short ones do: it is up to half as fast again.
pub(crate) struct SideBySide<'a> {
    under_way: Option<OneCopy<'a>>,
}

struct OneCopy<'a> {
    from: &'a Memory,
    start: u64,
    into: &'a Arc<Memory>,
    run: (u64, u64),
}

impl<'a> SideBySide<'a> {
    pub fn new() -> Self {
        Self { under_way: None }
    }

    /// Copies all of a place's bytes from `start` on, at once or together with those that are added next.
    pub fn add(&mut self, into: &'a Lent, from: &'a Memory, start: u64) {
        assert!(!from.writable, "what is copied without being lent is a peer's");
        let (view, memory) = (&into.0.view, &into.0.memory);
        debug_assert!(view.outer().is_empty());
        let (base, bytes) = (view.base(), view.run_bytes());
        if let Some(copy) = &mut self.under_way
            && std::ptr::eq(copy.from, from)
            && Arc::ptr_eq(copy.into, memory)
            && (copy.start + copy.run.1, copy.run.0 + copy.run.1) == (start, base)
        {
            copy.run.1 += bytes;
            return;
        }
        self.finish();
        self.under_way = Some(OneCopy { from, start, into: memory, run: (base, bytes) });
    }

    /// Copies what is left.
    pub fn finish(&mut self) {
        let Some(OneCopy { from, start, into, run }) = self.under_way.take() else { return };
        // SAFETY: every byte of the run is of a place that was added, and those are borrowed: see `Lent::of`. Nobody in this process writes
        // to a peer's segment, which is another mapping than ours.
        unsafe { put_copied(into.slice_mut(run), from, start, None) };
    }
}

/// Puts into place what lies at `at` of a memory, which may be a peer's: then its bytes are never a slice.
///
/// # Safety
/// Nobody in this process writes to them meanwhile.
unsafe fn put_copied(into: &mut [u8], from: &Memory, at: u64, combine: Option<Combine>) {
    let len = into.len() as u64;
    match combine {
        // SAFETY: the caller says so, and `into` is a slice of its own.
        None => unsafe { from.copy_out(at, into.as_mut_ptr(), len) },
        Some(combine) if !from.writable => {
            let mut bounce = [0; BOUNCE_BYTES];
            for (into, at) in into.chunks_mut(BOUNCE_BYTES).zip((at..).step_by(BOUNCE_BYTES)) {
                let bounce = &mut bounce[..into.len()];
                // SAFETY: as above.
                unsafe { from.copy_out(at, bounce.as_mut_ptr(), bounce.len() as u64) };
                combine.apply(into, bounce);
            }
        }
        // SAFETY: it is ours, and the caller says that nobody writes to it.
        Some(combine) => combine.apply(into, unsafe { from.slice((at, len)) }),
    }
}

fn put(into: &mut [u8], bytes: &[u8], combine: Option<Combine>) {
    match combine {
        None => into.copy_from_slice(bytes),
        Some(combine) => combine.apply(into, bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_core::region::{Region, Span};

    fn place(memory: &Arc<Memory>, base: u64, held: &Region, region: &Region) -> Lent {
        let place = Place { memory: memory.clone(), view: View::of_box(base, held, region, 2).unwrap() };
        // SAFETY: a test is one thread, and none of its places overlap.
        unsafe { Lent::of(&place) }.clone()
    }

    /// More than the bounce buffer holds, of elements that would notice being cut.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has no shared memory")]
    fn what_a_peer_shares_is_copied_and_combined() {
        use crossmesh_core::{dtype::DType, layout::ReduceOp};
        let elements = (3 * BOUNCE_BYTES / 8 + 5) as u64;
        let shared = Arc::new(Memory::shared(8 * elements).unwrap());
        shared.own().unwrap().elements_mut::<f64>(0, elements as usize).fill(1.5);
        let theirs = Memory::of_peer(shared.segment().unwrap().try_clone_to_owned().unwrap()).unwrap();
        let mine = Arc::new(Memory::private(8 * elements).unwrap());
        let whole = |memory: &Arc<Memory>| {
            let view = View::from_parts(0, 8 * elements, &[], memory.len()).unwrap();
            let place = Place { memory: memory.clone(), view };
            // SAFETY: a test is one thread.
            unsafe { Lent::of(&place) }.clone()
        };
        let (from, into) = (whole(&Arc::new(theirs)), whole(&mine));
        into.copy_from(&from, 0..8 * elements, None);
        into.copy_from(&from, 0..8 * elements, Some(Combine::new(DType::F64, ReduceOp::Sum)));
        assert!(mine.own().unwrap().elements::<f64>(0, elements as usize).iter().all(|e| *e == 3.0));
    }

    #[test]
    fn a_box_moves_between_buffers_of_different_shape() {
        let memory = Arc::new(Memory::private(4096).unwrap());
        let (wide, narrow) = (Region::whole(&[4, 6]), Region::new(vec![Span::new(1, 3), Span::new(1, 5)]));
        let whole = place(&memory, 0, &wide, &wide);
        whole.unpack(0, &(0..48).collect::<Vec<u8>>(), None).unwrap();
        let (from, into) = (place(&memory, 0, &wide, &narrow), place(&memory, 100, &narrow, &narrow));
        for part in [0..3, 3..3, 3..16] {
            into.copy_from(&from, part, None);
        }
        let (mut sent, mut got) = (vec![], vec![]);
        from.pack(0..16, &mut sent).unwrap();
        into.pack(0..16, &mut got).unwrap();
        assert_eq!(sent, [14, 15, 16, 17, 18, 19, 20, 21, 26, 27, 28, 29, 30, 31, 32, 33]);
        assert_eq!(got, sent);
        assert_eq!(into.checksum(4..16, into.checksum(0..4, 0)), crc32c::crc32c(&sent));
    }
}
