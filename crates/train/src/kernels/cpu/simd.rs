//! Loops that become vector instructions of the machine they run on.
//!
//! A function declared with [`vectorized!`] is compiled once for every instruction set and picks its version when it is
//! called, so that nobody has to build for one kind of processor. The body is plain Rust over slices; the compiler
//! makes vectors of it. What a loop may not reorder it does not: sums go through [`sum`] and [`dot`], which keep their own
//! lanes, so that a result does not depend on the machine's width.

use crate::kernels::scalar::Scalar;

/// Declares a function whose body is compiled for every instruction set. Borrowed arguments are written with `'a`.
macro_rules! vectorized {
    ($(#[$meta:meta])* $vis:vis fn $name:ident<$t:ident>($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name<'a, $t: crate::kernels::scalar::Scalar>($($arg: $ty),*) $(-> $ret)? {
            struct Call<'a, $t>($($ty,)* std::marker::PhantomData<&'a $t>);
            impl<'a, $t: crate::kernels::scalar::Scalar> pulp::WithSimd for Call<'a, $t> {
                type Output = vectorized!(@ret $($ret)?);

                #[inline(always)]
                fn with_simd<S: pulp::Simd>(self, _: S) -> Self::Output {
                    let Call($($arg,)* _) = self;
                    $body
                }
            }
            pulp::Arch::new().dispatch(Call($($arg,)* std::marker::PhantomData))
        }
    };
    (@ret) => { () };
    (@ret $ret:ty) => { $ret };
}

pub(super) use vectorized;

/// The lanes of a sum; the same everywhere, so that sums are too.
const LANES: usize = 16;

/// The sum of `f` over a slice, in [`LANES`] strands. To be called inside a vectorized body.
#[inline(always)]
pub(super) fn sum<T: Scalar>(x: &[T], f: impl Fn(T) -> T) -> T {
    let mut strands = [T::ZERO; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (strand, &x) in strands.iter_mut().zip(chunk) {
            *strand += f(x);
        }
    }
    for (strand, &x) in strands.iter_mut().zip(rest) {
        *strand += f(x);
    }
    fold(strands)
}

/// The sum of `f` over two slices of one length.
#[inline(always)]
pub(super) fn dot<T: Scalar>(x: &[T], y: &[T], f: impl Fn(T, T) -> T) -> T {
    let mut strands = [T::ZERO; LANES];
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    for (xs, ys) in xs.iter().zip(ys) {
        for (strand, (&x, &y)) in strands.iter_mut().zip(xs.iter().zip(ys)) {
            *strand += f(x, y);
        }
    }
    for (strand, (&x, &y)) in strands.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *strand += f(x, y);
    }
    fold(strands)
}

/// The sum of `f` over three slices of one length.
#[inline(always)]
pub(super) fn dot3<T: Scalar>(x: &[T], y: &[T], z: &[T], f: impl Fn(T, T, T) -> T) -> T {
    let mut strands = [T::ZERO; LANES];
    let (xs, x_rest) = x.as_chunks::<LANES>();
    let (ys, y_rest) = y.as_chunks::<LANES>();
    let (zs, z_rest) = z.as_chunks::<LANES>();
    for ((xs, ys), zs) in xs.iter().zip(ys).zip(zs) {
        for (strand, ((&x, &y), &z)) in strands.iter_mut().zip(xs.iter().zip(ys).zip(zs)) {
            *strand += f(x, y, z);
        }
    }
    for (strand, ((&x, &y), &z)) in strands.iter_mut().zip(x_rest.iter().zip(y_rest).zip(z_rest)) {
        *strand += f(x, y, z);
    }
    fold(strands)
}

/// The largest element; [`Scalar::LOWEST`] of an empty slice.
#[inline(always)]
pub(super) fn largest<T: Scalar>(x: &[T]) -> T {
    let mut strands = [T::LOWEST; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (strand, &x) in strands.iter_mut().zip(chunk) {
            *strand = strand.larger(x);
        }
    }
    for (strand, &x) in strands.iter_mut().zip(rest) {
        *strand = strand.larger(x);
    }
    strands.into_iter().fold(T::LOWEST, T::larger)
}

/// Adds the strands pairwise.
#[inline(always)]
fn fold<T: Scalar>(mut strands: [T; LANES]) -> T {
    let mut len = LANES / 2;
    while len > 0 {
        for i in 0..len {
            strands[i] += strands[i + len];
        }
        len /= 2;
    }
    strands[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    vectorized! {
        fn all<T>(x: &'a [T], y: &'a [T]) -> (T, T, T) {
            (sum(x, |x| x), dot(x, y, |x, y| x * y), largest(x))
        }
    }

    #[test]
    fn sums_and_maxima_of_every_length() {
        for len in 0..70 {
            let x: Vec<f64> = (0..len).map(|i| f64::from(i * 7 % 11) - 5.0).collect();
            let y: Vec<f64> = (0..len).map(f64::from).collect();
            let (s, d, m) = all(&x, &y);
            assert_eq!(s, x.iter().sum::<f64>());
            assert_eq!(d, x.iter().zip(&y).map(|(x, y)| x * y).sum::<f64>());
            assert_eq!(m, x.iter().copied().fold(f64::MIN, f64::max));
        }
    }
}
