//! Copies between boxes: what every driver is asked to do, and how the stand-in does it.
//!
//! A side is a run of bytes, repeated with a stride for every outer dim; its bytes in order are a stream. A copy moves a part of one stream to a part
//! of another, of the same length. Packing, unpacking and copies between tensors of any two shapes are the same thing.

use std::ops::Range;

/// The most outer dims that a side has.
pub const MAX_OUTER: usize = 8;

/// A part of a box's stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Side {
    /// The address of the box's first byte.
    pub base: u64,
    pub run: u64,
    /// How often, and how many bytes apart; major first.
    pub outer: Vec<(u64, u64)>,
    /// Where in the stream the part begins.
    pub start: u64,
}

impl Side {
    /// Bytes one behind the other.
    pub fn packed(address: u64, bytes: u64) -> Self {
        Self { base: address, run: bytes, outer: vec![], start: 0 }
    }

    /// The same part, as one run where it is one.
    fn simplified(mut self, bytes: u64) -> Self {
        let within = self.start.checked_rem(self.run).unwrap_or(0);
        if within + bytes <= self.run || self.outer.is_empty() {
            return Self::packed(self.address(self.start), bytes);
        }
        self.outer.retain(|(count, _)| *count > 1);
        self
    }

    /// Where a byte of the stream is.
    pub fn address(&self, at: u64) -> u64 {
        let (mut index, within) = match self.run {
            0 => (0, 0),
            run => (at / run, at % run),
        };
        let mut address = self.base + within;
        for (count, stride) in self.outer.iter().rev() {
            address += index % count * stride;
            index /= count;
        }
        address
    }

    /// All that its width has to divide, or-ed: the lowest bit that is set is the widest vector.
    fn grain(&self) -> u64 {
        let strides = self.outer.iter().fold(0, |all, (_, stride)| all | stride);
        let run = if self.outer.is_empty() { 0 } else { self.run };
        self.base | self.start | run | strides
    }

    /// The lowest and the highest address of the whole box.
    pub fn extent(&self) -> Range<u64> {
        let reach: u64 = self.outer.iter().map(|(count, stride)| (count - 1) * stride).sum();
        self.base..self.base + reach + self.run
    }
}

/// How what arrives is combined with what is there.
#[derive(Debug, Clone, Copy)]
pub struct Combine {
    /// As dtypes and ops are called: `f32`, `sum`.
    pub dtype: &'static str,
    pub op: &'static str,
    pub element_bytes: u64,
    /// What the kernel does, on the host.
    pub host: fn(&mut [u8], &[u8]),
}

/// A copy of a part.
#[derive(Debug, Clone)]
pub struct BoxCopy {
    pub from: Side,
    pub into: Side,
    pub bytes: u64,
    pub combine: Option<Combine>,
}

/// What a kernel is launched with: see `boxes.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Divider {
    divisor: u32,
    factor: u32,
    shift: u32,
}

impl Divider {
    /// For dividends below 2^31 (Granlund and Montgomery, PLDI'94).
    fn new(divisor: u64) -> Self {
        let Ok(divisor) = u32::try_from(divisor.max(1)) else {
            return Self { divisor: 0, factor: 0, shift: 31 };
        };
        let shift = 32 - (divisor - 1).leading_zeros();
        let factor = (((1u64 << shift) - u64::from(divisor)) << 32) / u64::from(divisor) + 1;
        Self { divisor, factor: factor as u32, shift }
    }

    /// As the kernel does it.
    #[cfg(test)]
    fn quotient(self, n: u32) -> u32 {
        let high = ((u64::from(n) * u64::from(self.factor)) >> 32) as u32;
        ((u64::from(high) + u64::from(n)) >> self.shift) as u32
    }
}

/// A side in units of vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct KernelSide {
    base: u64,
    start: u64,
    run: u64,
    by_run: Divider,
    dims: u32,
    counts: [u64; MAX_OUTER],
    strides: [u64; MAX_OUTER],
    by_count: [Divider; MAX_OUTER],
}

impl KernelSide {
    fn new(side: &Side, width: u64) -> Self {
        let mut out = Self {
            base: side.base,
            start: side.start / width,
            run: (side.run / width).max(1),
            by_run: Divider::new(side.run / width),
            dims: side.outer.len() as u32,
            counts: [1; MAX_OUTER],
            strides: [0; MAX_OUTER],
            by_count: [Divider::new(1); MAX_OUTER],
        };
        for (dim, (count, stride)) in side.outer.iter().enumerate() {
            (out.counts[dim], out.strides[dim]) = (*count, *stride);
            out.by_count[dim] = Divider::new(*count);
        }
        out
    }
}

/// How a copy is done.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "looked at once, where it was made")]
pub enum Means {
    Nothing,
    /// One run to another: the copy engines do it.
    Plain {
        from: u64,
        into: u64,
        bytes: u64,
    },
    Kernel {
        name: String,
        from: KernelSide,
        into: KernelSide,
        vectors: u64,
    },
}

impl BoxCopy {
    /// Decides how it is done.
    pub fn means(&self) -> Means {
        if self.bytes == 0 {
            return Means::Nothing;
        }
        let (from, into) =
            (self.from.clone().simplified(self.bytes), self.into.clone().simplified(self.bytes));
        if let Some(combine) = self.combine {
            let name = format!("combine_{}_{}", combine.dtype, combine.op);
            return kernel(name, &from, &into, combine.element_bytes, self.bytes);
        }
        if from.outer.is_empty() && into.outer.is_empty() {
            return Means::Plain { from: from.base, into: into.base, bytes: self.bytes };
        }
        let grain = from.grain() | into.grain() | self.bytes | 16;
        let width = 1 << grain.trailing_zeros();
        // Where the part ends decides how large indices become, not how long it is.
        let last = |side: &Side| (side.start + self.bytes) / width;
        let wide = last(&from).max(last(&into)) >= 1 << 31;
        let name = format!("copy_{width}{}", if wide { "_wide" } else { "" });
        kernel(name, &from, &into, width, self.bytes)
    }

    /// Does it here.
    ///
    /// # Safety
    /// Both sides are host memory that nobody else touches meanwhile, and they do not overlap.
    #[expect(unsafe_code, reason = "addresses are what drivers are given")]
    pub unsafe fn run_on_host(&self) {
        let mut done = 0;
        while done < self.bytes {
            let left = |side: &Side| side.run - (side.start + done) % side.run;
            let len = (self.bytes - done).min(left(&self.from)).min(left(&self.into)) as usize;
            let at = |side: &Side| side.address(side.start + done) as usize;
            // SAFETY: as the caller says.
            let (from, into) = unsafe {
                (
                    std::slice::from_raw_parts(at(&self.from) as *const u8, len),
                    std::slice::from_raw_parts_mut(at(&self.into) as *mut u8, len),
                )
            };
            match self.combine {
                Some(combine) => (combine.host)(into, from),
                None => into.copy_from_slice(from),
            }
            done += len as u64;
        }
    }
}

fn kernel(name: String, from: &Side, into: &Side, width: u64, bytes: u64) -> Means {
    let (from, into) = (KernelSide::new(from, width), KernelSide::new(into, width));
    Means::Kernel { name, from, into, vectors: bytes / width }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "the tests' own buffers")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Where the kernel finds a vector, in its own arithmetic.
    fn address(side: &KernelSide, vector: u64, width: u64) -> u64 {
        let at = (side.start + vector) as u32;
        let mut index = side.by_run.quotient(at);
        let mut address = side.base + u64::from(at - index * side.run as u32) * width;
        for dim in (0..side.dims as usize).rev() {
            let rest = side.by_count[dim].quotient(index);
            address += u64::from(index - rest * side.counts[dim] as u32) * side.strides[dim];
            index = rest;
        }
        address
    }

    /// Sides of the same length, `grain` times as wide as they are drawn.
    fn arb_side(bytes: u64) -> impl Strategy<Value = Side> {
        let dims = prop::collection::vec((1u64..5, 0u64..4), 0..4);
        (0u64..64, 1u64..40, dims, 0u64..50).prop_map(move |(base, run, dims, start)| {
            let (mut stride, mut outer) = (run, vec![]);
            for (count, gap) in dims {
                stride += gap;
                outer.push((count, stride));
                stride *= count;
            }
            // The last repeats often enough.
            let held: u64 = run * outer.iter().map(|(c, _)| c).product::<u64>();
            outer.push(((start + bytes).div_ceil(held), stride));
            outer.reverse();
            Side { base, run, outer, start }
        })
    }

    fn arb_copy() -> impl Strategy<Value = (Side, Side, u64, u64)> {
        (1u64..200, prop::sample::select(vec![1u64, 2, 4, 8, 16, 32])).prop_flat_map(|(bytes, grain)| {
            let scaled = move |side: Side| Side {
                base: side.base * grain,
                run: side.run * grain,
                outer: side.outer.iter().map(|(c, s)| (*c, s * grain)).collect(),
                start: side.start * grain,
            };
            let scaled = move |side| scaled(side);
            (
                arb_side(bytes).prop_map(scaled),
                arb_side(bytes).prop_map(scaled),
                Just(bytes * grain),
                Just(grain),
            )
        })
    }

    proptest! {
        #[test]
        fn division_by_multiplication_is_exact(n in 0u32..1 << 31, d in 1u64..1 << 31) {
            prop_assert_eq!(u64::from(Divider::new(d).quotient(n)), u64::from(n) / d);
            for d in [1, 2, 3, 5, 7, 1 << 30, (1 << 31) - 1] {
                prop_assert_eq!(u64::from(Divider::new(d).quotient(n)), u64::from(n) / d);
            }
        }

        /// The kernel's arithmetic reads and writes the bytes that the plain way does, in vectors as wide as they may be.
        #[test]
        fn kernels_find_what_the_plain_way_finds((from, into, bytes, grain) in arb_copy()) {
            let copy = BoxCopy { from: from.clone(), into: into.clone(), bytes, combine: None };
            let slow: Vec<(u64, u64)> =
                (0..bytes).map(|i| (from.address(from.start + i), into.address(into.start + i))).collect();
            let fast: Vec<(u64, u64)> = match copy.means() {
                Means::Nothing => vec![],
                Means::Plain { from, into, bytes } => (0..bytes).map(|i| (from + i, into + i)).collect(),
                Means::Kernel { name, from, into, vectors } => {
                    let width: u64 = name.strip_prefix("copy_").unwrap().parse().unwrap();
                    prop_assert!(width >= grain.min(16), "{} for {}", width, grain);
                    let vector = |v| (address(&from, v, width), address(&into, v, width));
                    let wide: Vec<(u64, u64)> = (0..vectors).map(vector).collect();
                    prop_assert!(wide.iter().all(|(a, b)| a % width == 0 && b % width == 0));
                    wide.iter().flat_map(|(a, b)| (0..width).map(move |i| (a + i, b + i))).collect()
                }
            };
            prop_assert_eq!(fast, slow);
        }

        #[test]
        fn the_host_copies_byte_by_byte((from, into, bytes, _) in arb_copy()) {
            let source: Vec<u8> = (0..from.extent().end).map(|i| (i * 7 % 251) as u8).collect();
            let mut target = vec![0xEE; into.extent().end as usize];
            let mut expected = target.clone();
            for i in 0..bytes {
                expected[into.address(into.start + i) as usize] = source[from.address(from.start + i) as usize];
            }
            let shifted = |side: &Side, by: *const u8| Side { base: side.base + by as u64, ..side.clone() };
            let (from, into) = (shifted(&from, source.as_ptr()), shifted(&into, target.as_mut_ptr()));
            // SAFETY: two vectors of ours.
            unsafe { BoxCopy { from, into, bytes, combine: None }.run_on_host() };
            prop_assert_eq!(target, expected);
        }
    }
}
