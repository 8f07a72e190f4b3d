//! Elements that collectives move and combine, and what they combine them by.

use crossmesh_core::dtype::DType;
use crossmesh_core::layout::ReduceOp;
use half::{bf16, f16};

mod sealed {
    pub trait Sealed {}
}

/// A number that can be moved and added up. Any bits are a value, and there is no padding.
pub trait Element: sealed::Sealed + Copy + Default + Send + Sync + 'static {
    const DTYPE: DType;

    /// One of `parts` equal parts: what a mean is of a sum.
    fn part_of(self, parts: u32) -> Self;
}

macro_rules! elements {
    ($($type:ty, $dtype:ident, $divide:expr;)*) => {
        $(
            impl sealed::Sealed for $type {}

            impl Element for $type {
                const DTYPE: DType = DType::$dtype;

                fn part_of(self, parts: u32) -> Self {
                    let divide: fn($type, u32) -> $type = $divide;
                    divide(self, parts)
                }
            }
        )*
    };
}

elements! {
    f64, F64, |sum, parts| sum / f64::from(parts);
    f32, F32, |sum, parts| sum / parts as f32;
    bf16, Bf16, |sum, parts| bf16::from_f32(sum.to_f32() / parts as f32);
    f16, F16, |sum, parts| f16::from_f32(sum.to_f32() / parts as f32);
    i64, I64, |sum, parts| sum / i64::from(parts);
    // In 64 bits: no count of ranks is negative there.
    i32, I32, |sum, parts| (i64::from(sum) / i64::from(parts)) as i32;
    i8, I8, |sum, parts| (i64::from(sum) / i64::from(parts)) as i8;
    u8, U8, |sum, parts| (u32::from(sum) / parts) as u8;
}

/// How the parts of a reduction become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Reduction {
    #[default]
    Sum,
    Max,
    Min,
    /// The sum over the number of ranks, divided once at the end; whole numbers are cut off towards zero.
    Mean,
}

impl Reduction {
    pub const ALL: [Reduction; 4] = [Reduction::Sum, Reduction::Max, Reduction::Min, Reduction::Mean];

    /// What is done on the way.
    pub fn op(self) -> ReduceOp {
        match self {
            Reduction::Sum | Reduction::Mean => ReduceOp::Sum,
            Reduction::Max => ReduceOp::Max,
            Reduction::Min => ReduceOp::Min,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Reduction::Mean => "mean",
            other => other.op().name(),
        }
    }
}

impl From<ReduceOp> for Reduction {
    fn from(op: ReduceOp) -> Self {
        match op {
            ReduceOp::Sum => Reduction::Sum,
            ReduceOp::Max => Reduction::Max,
            ReduceOp::Min => Reduction::Min,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_are_parts_of_sums() {
        assert_eq!(7.0f32.part_of(2), 3.5);
        assert_eq!((-7i32).part_of(2), -3);
        assert_eq!(bf16::from_f32(10.0).part_of(4), bf16::from_f32(2.5));
        assert_eq!((7i64 << 40).part_of(7), 1 << 40);
    }
}
