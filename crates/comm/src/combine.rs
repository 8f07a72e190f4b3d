//! Adding up partial sums: one loop per dtype and op, chosen outside.
//!
//! Floats of 16 and of 8 bits are combined in f32 and rounded once per step, as everybody does. Whole numbers wrap around. The largest
//! and the smallest are the same in whatever order they are looked for: a NaN wins over everything, so that it is not
//! lost, and zeros are told apart, -0 below +0. Bytes may lie anywhere, so elements are read and written bytewise; the
//! compiler makes plain vector loads of it.

use crossmesh_core::dtype::DType;
use crossmesh_core::layout::ReduceOp;
use half::{bf16, f16};

/// How what arrives is combined with what is there.
#[derive(Debug, Clone, Copy)]
pub struct Combine {
    dtype: DType,
    op: ReduceOp,
    run: fn(&mut [u8], &[u8]),
}

impl Combine {
    pub fn new(dtype: DType, op: ReduceOp) -> Self {
        let run = match dtype {
            DType::F64 => float64(op),
            DType::F32 => float32(op),
            DType::Bf16 => brain16(op),
            DType::F16 => half16(op),
            DType::I64 => int64(op),
            DType::I32 => int32(op),
            DType::I8 => int8(op),
            DType::U8 => uint8(op),
            DType::Bool => boolean(op),
            DType::F8E4M3 => float8e4m3(op),
            DType::F8E5M2 => float8e5m2(op),
        };
        Self { dtype, op, run }
    }

    pub fn element_bytes(&self) -> usize {
        self.dtype.bytes() as usize
    }

    /// The same for a GPU, whose kernels are named by dtype and op.
    pub(crate) fn on_device(&self) -> crossmesh_cuda::Combine {
        let op = match self.op {
            ReduceOp::Sum => "sum",
            ReduceOp::Max => "max",
            ReduceOp::Min => "min",
        };
        crossmesh_cuda::Combine {
            dtype: self.dtype.name(),
            op,
            element_bytes: self.dtype.bytes(),
            host: self.run,
        }
    }

    /// Combines whole elements.
    pub fn apply(&self, into: &mut [u8], bytes: &[u8]) {
        assert_eq!(into.len(), bytes.len());
        debug_assert_eq!(bytes.len() % self.element_bytes(), 0);
        (self.run)(into, bytes);
    }
}

/// The loops of a dtype: sum, max and min.
macro_rules! loops {
    ($name:ident, $type:ty, $bytes:literal, $sum:expr, $max:expr, $min:expr) => {
        fn $name(op: ReduceOp) -> fn(&mut [u8], &[u8]) {
            fn each(into: &mut [u8], bytes: &[u8], combine: impl Fn($type, $type) -> $type) {
                for (into, bytes) in into.chunks_exact_mut($bytes).zip(bytes.chunks_exact($bytes)) {
                    let a = <$type>::from_le_bytes((&*into).try_into().expect("exact chunks"));
                    let b = <$type>::from_le_bytes(bytes.try_into().expect("exact chunks"));
                    into.copy_from_slice(&combine(a, b).to_le_bytes());
                }
            }
            match op {
                ReduceOp::Sum => |into, bytes| each(into, bytes, $sum),
                ReduceOp::Max => |into, bytes| each(into, bytes, $max),
                ReduceOp::Min => |into, bytes| each(into, bytes, $min),
            }
        }
    };
}

loops!(float64, f64, 8, |a, b| a + b, largest64, smallest64);
loops!(float32, f32, 4, |a, b| a + b, largest32, smallest32);
loops!(brain16, bf16, 2, |a, b| a + b, |a, b| bf16::from_f32(largest32(a.to_f32(), b.to_f32())), |a, b| {
    bf16::from_f32(smallest32(a.to_f32(), b.to_f32()))
});
loops!(half16, f16, 2, |a, b| a + b, |a, b| f16::from_f32(largest32(a.to_f32(), b.to_f32())), |a, b| {
    f16::from_f32(smallest32(a.to_f32(), b.to_f32()))
});
loops!(int64, i64, 8, i64::wrapping_add, i64::max, i64::min);
loops!(int32, i32, 4, i32::wrapping_add, i32::max, i32::min);
loops!(int8, i8, 1, i8::wrapping_add, i8::max, i8::min);
loops!(uint8, u8, 1, u8::wrapping_add, u8::max, u8::min);
// A sum of truths is true if one of them is.
loops!(boolean, u8, 1, |a, b| a | b, u8::max, u8::min);

/// Exactly, which `powi` does not promise.
fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + 1023) as u64) << 52)
}

/// An 8-bit float: a sign, `$exponent` bits of exponent, the rest mantissa. Numbers are rounded to the nearest, to even on a tie, and
/// what is too large becomes what torch makes of it: NaN where there are no infinities, else infinity.
macro_rules! float8 {
    ($name:ident, $exponent:literal, $infinities:literal) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name(pub u8);

        impl $name {
            const MANTISSA: u32 = 7 - $exponent;
            const BIAS: i32 = (1 << ($exponent - 1)) - 1;
            const NAN: u8 = 0x7f;

            pub fn to_f32(self) -> f32 {
                let sign = if self.0 & 0x80 != 0 { -1.0 } else { 1.0 };
                let exponent = i32::from(self.0 & 0x7f) >> Self::MANTISSA;
                let mantissa = f32::from(self.0 & ((1 << Self::MANTISSA) - 1));
                let top = (1 << $exponent) - 1;
                let scale = |e: i32| power_of_two(e - Self::BIAS - Self::MANTISSA as i32) as f32;
                if $infinities && exponent == top {
                    return if mantissa == 0.0 { sign * f32::INFINITY } else { f32::NAN };
                }
                if !$infinities && self.0 & 0x7f == Self::NAN {
                    return f32::NAN;
                }
                match exponent {
                    0 => sign * mantissa * scale(1),
                    e => sign * (mantissa + (1u32 << Self::MANTISSA) as f32) * scale(e),
                }
            }

            pub fn from_f32(value: f32) -> Self {
                let sign = ((value.to_bits() >> 24) & 0x80) as u8;
                if value.is_nan() {
                    return Self(sign | Self::NAN);
                }
                // In steps of the finest that its exponent has, rounded by the hardware; a carry makes the next exponent.
                let magnitude = value.abs();
                let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(1 - Self::BIAS);
                let step = power_of_two(exponent - Self::MANTISSA as i32);
                let steps = (f64::from(magnitude) / step).round_ties_even();
                let biased = i64::from(exponent + Self::BIAS - 1) << Self::MANTISSA;
                let bits = if steps.is_finite() { biased.saturating_add(steps as i64) } else { i64::MAX };
                let first_bad = if $infinities { ((1 << $exponent) - 1) << Self::MANTISSA } else { 0x7f };
                match bits < first_bad {
                    true => Self(sign | bits as u8),
                    false => Self(sign | first_bad as u8),
                }
            }

            fn from_le_bytes(bytes: [u8; 1]) -> Self {
                Self(bytes[0])
            }

            fn to_le_bytes(self) -> [u8; 1] {
                [self.0]
            }

            fn with(self, other: Self, combine: impl Fn(f32, f32) -> f32) -> Self {
                Self::from_f32(combine(self.to_f32(), other.to_f32()))
            }
        }
    };
}

float8!(F8E4M3, 4, false);
float8!(F8E5M2, 5, true);
loops!(float8e4m3, F8E4M3, 1, |a, b| a.with(b, |a, b| a + b), |a, b| a.with(b, largest32), |a, b| a
    .with(b, smallest32));
loops!(float8e5m2, F8E5M2, 1, |a, b| a.with(b, |a, b| a + b), |a, b| a.with(b, largest32), |a, b| a
    .with(b, smallest32));

/// The larger of two, whichever comes first.
macro_rules! extremes {
    ($largest:ident, $smallest:ident, $type:ident) => {
        fn $largest(a: $type, b: $type) -> $type {
            if a > b || (a == b && a.is_sign_positive()) {
                a
            } else if a <= b {
                b
            } else {
                $type::NAN
            }
        }

        fn $smallest(a: $type, b: $type) -> $type {
            -$largest(-a, -b)
        }
    };
}

extremes!(largest64, smallest64, f64);
extremes!(largest32, smallest32, f32);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_have_no_order() {
        let values = [0.0f32, -0.0, 1.5, -1.5, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        for op in [ReduceOp::Max, ReduceOp::Min] {
            for (a, b) in values.iter().flat_map(|a| values.map(|b| (*a, b))) {
                let combined = |a: f32, b: f32| {
                    let mut into = a.to_le_bytes();
                    Combine::new(DType::F32, op).apply(&mut into, &b.to_le_bytes());
                    f32::from_le_bytes(into)
                };
                let (one, other) = (combined(a, b), combined(b, a));
                assert_eq!(one.to_bits() & !(1 << 31), other.to_bits() & !(1 << 31), "{op} of {a} and {b}");
                assert_eq!(one.is_nan(), a.is_nan() || b.is_nan(), "{op} of {a} and {b}");
                let zero = if op == ReduceOp::Max { 0.0f32 } else { -0.0 };
                if a == 0.0 && b == 0.0 && a.to_bits() != b.to_bits() {
                    assert_eq!(one.to_bits(), zero.to_bits());
                    assert_eq!(other.to_bits(), zero.to_bits());
                }
            }
        }
    }

    #[test]
    fn combines_every_dtype() {
        type Case = (DType, Vec<u8>, Vec<u8>, [Vec<u8>; 3]);
        let cases: [Case; 5] = [
            (
                DType::F32,
                le32(&[1.5, -2.0]),
                le32(&[2.0, 4.0]),
                [le32(&[3.5, 2.0]), le32(&[2.0, 4.0]), le32(&[1.5, -2.0])],
            ),
            (DType::I8, vec![127, 1], vec![1, 255], [vec![128, 0], vec![127, 1], vec![1, 255]]),
            (DType::Bool, vec![0, 1], vec![1, 1], [vec![1, 1], vec![1, 1], vec![0, 1]]),
            (
                DType::Bf16,
                bf16::from_f32(100.0).to_le_bytes().to_vec(),
                bf16::from_f32(-3.0).to_le_bytes().to_vec(),
                [97.0, 100.0, -3.0].map(|x| bf16::from_f32(x).to_le_bytes().to_vec()),
            ),
            (
                DType::F16,
                f16::from_f32(0.5).to_le_bytes().to_vec(),
                f16::from_f32(2.0).to_le_bytes().to_vec(),
                [2.5, 2.0, 0.5].map(|x| f16::from_f32(x).to_le_bytes().to_vec()),
            ),
        ];
        for (dtype, a, b, expected) in cases {
            for (op, expected) in ReduceOp::ALL.into_iter().zip(expected) {
                let mut into = a.clone();
                Combine::new(dtype, op).apply(&mut into, &b);
                assert_eq!(into, expected, "{op} of {dtype}");
            }
        }
    }

    fn le32(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    /// The nearest of all values by search; of two, the one with an even last bit.
    fn nearest(value: f32, all: &[(u8, f32)]) -> u8 {
        let far = |v: f32| (f64::from(v) - f64::from(value)).abs();
        let best = all.iter().min_by(|a, b| far(a.1).total_cmp(&far(b.1)).then((a.0 & 1).cmp(&(b.0 & 1))));
        best.expect("there are values").0
    }

    #[test]
    fn eight_bit_floats_round_to_the_nearest() {
        let finite = |to_f32: fn(u8) -> f32| {
            (0..128u8).map(|b| (b, to_f32(b))).filter(|(_, v)| v.is_finite()).collect::<Vec<_>>()
        };
        let (e4m3, e5m2) = (finite(|b| F8E4M3(b).to_f32()), finite(|b| F8E5M2(b).to_f32()));
        assert_eq!((e4m3.last().unwrap().1, e5m2.last().unwrap().1), (448.0, 57344.0));
        assert_eq!((e4m3[1].1, e5m2[1].1), (2f32.powi(-9), 2f32.powi(-16)));
        for i in 0..20_000 {
            let value = f32::from_bits(0x3000_0000 + i * 0x0000_8cab);
            if value <= 448.0 {
                assert_eq!(F8E4M3::from_f32(value).0, nearest(value, &e4m3), "{value}");
            }
            if value <= 57344.0 {
                assert_eq!(F8E5M2::from_f32(value).0, nearest(value, &e5m2), "{value}");
            }
        }
        assert!(F8E4M3::from_f32(1e9).to_f32().is_nan() && F8E4M3::from_f32(f32::NAN).to_f32().is_nan());
        assert_eq!(F8E5M2::from_f32(-1e9).to_f32(), f32::NEG_INFINITY);
        for b in 0..=255u8 {
            if F8E4M3(b).to_f32().is_finite() {
                assert_eq!(F8E4M3::from_f32(F8E4M3(b).to_f32()).0, b);
            }
            if F8E5M2(b).to_f32().is_finite() {
                assert_eq!(F8E5M2::from_f32(F8E5M2(b).to_f32()).0, b);
            }
        }
    }
}
