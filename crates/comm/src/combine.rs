//! Adding up partial sums: one loop per dtype and op, chosen outside.
//!
//! bf16 and f16 are combined in f32 and rounded once per step, as everybody does. Whole numbers wrap around. The largest
//! and the smallest are the same in whatever order they are looked for: a NaN wins over everything, so that it is not
//! lost, and zeros are told apart, -0 below +0. Bytes may lie anywhere, so elements are read and written bytewise; the
//! compiler makes plain vector loads of it.

use crossmesh_core::dtype::DType;
use crossmesh_core::layout::ReduceOp;
use half::{bf16, f16};

/// How what arrives is combined with what is there.
#[derive(Debug, Clone, Copy)]
pub struct Combine {
    element_bytes: usize,
    run: fn(&mut [u8], &[u8]),
}

impl Combine {
    /// None for dtypes that nobody adds up in: the 8-bit floats.
    pub fn new(dtype: DType, op: ReduceOp) -> Option<Self> {
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
            DType::F8E4M3 | DType::F8E5M2 => return None,
        };
        Some(Self { element_bytes: dtype.bytes() as usize, run })
    }

    pub fn element_bytes(&self) -> usize {
        self.element_bytes
    }

    /// Combines whole elements.
    pub fn apply(&self, into: &mut [u8], bytes: &[u8]) {
        assert_eq!(into.len(), bytes.len());
        debug_assert_eq!(bytes.len() % self.element_bytes, 0);
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
                    Combine::new(DType::F32, op).unwrap().apply(&mut into, &b.to_le_bytes());
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
                Combine::new(dtype, op).unwrap().apply(&mut into, &b);
                assert_eq!(into, expected, "{op} of {dtype}");
            }
        }
    }

    fn le32(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| v.to_le_bytes()).collect()
    }

    #[test]
    fn eight_bit_floats_are_only_moved() {
        assert!(Combine::new(DType::F8E4M3, ReduceOp::Sum).is_none());
    }
}
