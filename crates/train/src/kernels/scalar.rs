//! The numbers we train with: f32 and f64, through one trait.
//!
//! Besides arithmetic a [`Scalar`] brings an `exp` without branches, so that a loop over a row becomes vector
//! instructions, and the lanes of those instructions for code that counts registers (the matrix product).

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign};

use crossmesh_comm::collectives::Element;
use pulp::Simd;

/// A real number: f32 or f64.
pub trait Scalar:
    Element
    + Copy
    + Send
    + Sync
    + Default
    + Debug
    + Display
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + Sum
    + bytemuck::Pod
    + 'static
{
    const ZERO: Self;
    const ONE: Self;
    const LOWEST: Self;
    const NAN: Self;

    fn from_f64(value: f64) -> Self;
    fn to_f64(self) -> f64;
    fn mul_add(self, a: Self, b: Self) -> Self;
    fn sqrt(self) -> Self;
    fn ln(self) -> Self;
    /// e^x to within a few units in the last place; zero where the result would be subnormal. No branch, no call.
    fn exp(self) -> Self;
    /// The larger of two numbers; of a number and NaN, whichever stands on the right.
    fn larger(self, other: Self) -> Self {
        if self > other { self } else { other }
    }

    /// A vector register's worth.
    type Lanes<S: Simd>: Copy;
    fn lanes<S: Simd>() -> usize;
    fn splat<S: Simd>(simd: S, value: Self) -> Self::Lanes<S>;
    /// `a * b + c`, lane by lane; rounded once or twice, whichever is quicker.
    fn fma<S: Simd>(simd: S, a: Self::Lanes<S>, b: Self::Lanes<S>, c: Self::Lanes<S>) -> Self::Lanes<S>;
    fn as_lanes<S: Simd>(slice: &[Self]) -> &[Self::Lanes<S>];
    fn as_lanes_mut<S: Simd>(slice: &mut [Self]) -> &mut [Self::Lanes<S>];
}

/// One over the factorials: the terms of e^x, the last first.
const fn taylor<const N: usize>() -> [f64; N] {
    let mut terms = [1.0; N];
    let mut i = N - 1;
    while i > 0 {
        terms[i - 1] = terms[i] / (N - i) as f64;
        i -= 1;
    }
    terms
}

macro_rules! scalar {
    ($t:ident, $bits:ident, $lanes:ident, $lanes_count:ident, $splat:ident, $fma:ident,
     $as_simd:ident, $as_mut_simd:ident, $exp:expr) => {
        impl Scalar for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const LOWEST: Self = $t::MIN;
            const NAN: Self = $t::NAN;

            #[inline(always)]
            fn from_f64(value: f64) -> Self {
                value as $t
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }

            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                $t::mul_add(self, a, b)
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                $t::sqrt(self)
            }

            #[inline(always)]
            fn ln(self) -> Self {
                $t::ln(self)
            }

            #[inline(always)]
            fn exp(self) -> Self {
                const E: Exp<$t, { $exp.terms }> = $exp;
                // x = n ln 2 + r. Adding 1.5 * 2^mantissa rounds to an integer, which then lies in the low bits.
                let shifted = self.mul_add(std::$t::consts::LOG2_E, E.magic);
                let n = shifted - E.magic;
                let r = n.mul_add(-E.ln2_high, self);
                let r = n.mul_add(-E.ln2_low, r);
                let mut sum = E.taylor[0];
                let mut i = 1;
                while i < E.terms {
                    sum = sum.mul_add(r, E.taylor[i]);
                    i += 1;
                }
                let mantissa = $t::MANTISSA_DIGITS - 1;
                let bias = ($t::MAX_EXP - 1) as $bits;
                let power = $t::from_bits((shifted.to_bits() << mantissa).wrapping_add(bias << mantissa));
                if self < E.lowest {
                    0.0
                } else if self > E.highest {
                    $t::INFINITY
                } else {
                    sum * power
                }
            }

            type Lanes<S: Simd> = S::$lanes;

            #[inline(always)]
            fn lanes<S: Simd>() -> usize {
                S::$lanes_count
            }

            #[inline(always)]
            fn splat<S: Simd>(simd: S, value: Self) -> S::$lanes {
                simd.$splat(value)
            }

            #[inline(always)]
            fn fma<S: Simd>(simd: S, a: S::$lanes, b: S::$lanes, c: S::$lanes) -> S::$lanes {
                simd.$fma(a, b, c)
            }

            #[inline(always)]
            fn as_lanes<S: Simd>(slice: &[Self]) -> &[S::$lanes] {
                S::$as_simd(slice).0
            }

            #[inline(always)]
            fn as_lanes_mut<S: Simd>(slice: &mut [Self]) -> &mut [S::$lanes] {
                S::$as_mut_simd(slice).0
            }
        }
    };
}

/// What `exp` of one width is made of.
struct Exp<T, const N: usize> {
    terms: usize,
    magic: T,
    ln2_high: T,
    ln2_low: T,
    taylor: [T; N],
    /// Below this 2^n is subnormal; above `highest` it is too large for an exponent.
    lowest: T,
    highest: T,
}

const fn taylor32() -> [f32; 8] {
    let wide = taylor::<8>();
    let mut terms = [0.0; 8];
    let mut i = 0;
    while i < 8 {
        terms[i] = wide[i] as f32;
        i += 1;
    }
    terms
}

const EXP32: Exp<f32, 8> = Exp {
    terms: 8,
    magic: 12_582_912.0,
    // ln 2 in two parts, the first with few enough bits that n times it is exact.
    ln2_high: 0.693_359_4,
    ln2_low: -2.121_944_4e-4,
    taylor: taylor32(),
    lowest: -87.3,
    highest: 88.3,
};

const EXP64: Exp<f64, 14> = Exp {
    terms: 14,
    magic: 6_755_399_441_055_744.0,
    ln2_high: 6.931_471_803_691_238e-1,
    ln2_low: 1.908_214_929_270_587_7e-10,
    taylor: taylor::<14>(),
    lowest: -708.0,
    highest: 709.0,
};

scalar!(f32, u32, f32s, F32_LANES, splat_f32s, mul_add_e_f32s, as_simd_f32s, as_mut_simd_f32s, EXP32);
scalar!(f64, u64, f64s, F64_LANES, splat_f64s, mul_add_e_f64s, as_simd_f64s, as_mut_simd_f64s, EXP64);

/// How an activation bends: 1 / (1 + e^-x).
#[inline(always)]
pub fn sigmoid<T: Scalar>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn exp_at_its_ends() {
        assert_eq!(Scalar::exp(0.0f32), 1.0);
        assert_eq!(Scalar::exp(0.0f64), 1.0);
        assert_eq!(Scalar::exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(Scalar::exp(-1e4f64), 0.0);
        assert_eq!(Scalar::exp(1e3f32), f32::INFINITY);
        assert!(Scalar::exp(f32::NAN).is_nan());
    }

    proptest! {
        #[test]
        fn exp_is_the_exponential(x in -87.0f64..88.0) {
            let exact = x.exp();
            prop_assert!((Scalar::exp(x) - exact).abs() <= 4e-16 * exact);
            let exact = f64::from(x as f32).exp();
            prop_assert!((f64::from(Scalar::exp(x as f32)) - exact).abs() <= 3e-7 * exact);
        }

        #[test]
        fn exp_of_wide_arguments(x in -707.0f64..708.0) {
            prop_assert!((Scalar::exp(x) - x.exp()).abs() <= 1e-15 * x.exp());
        }
    }
}
