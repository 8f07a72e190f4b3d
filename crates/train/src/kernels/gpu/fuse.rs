//! Two calls that are one kernel.
//!
//! A model calls one small kernel behind the other, and knows nothing of what a device could do in one. So some calls wait for the next:
//!
//! ```text
//! gemm + bias -> x, activate(gelu, x) -> y       one product that writes both x and y
//! gemm -> dy,       activate_grad(gelu, x, dy)   one product whose result is multiplied with gelu'(x)
//! residual -> y,    norm(y)                      one kernel that adds, writes the sum, and normalises it
//! ```
//!
//! Any other call lets the one that waits go first, so the order is what it was. Memory that a call which waits still reads may be dropped, and handed out
//! again: then it goes before whoever takes the memory ([`Waiting::touches`]).

use std::ops::Range;

use crossmesh_cuda::cuda::lt::{Epilogue, Product};
use crossmesh_cuda::cuda::ops::{At, Real, Rows};

/// A call that waits.
#[derive(Debug, Clone, Copy)]
pub enum Waiting {
    Product { product: Product, operands: (At, At), into: At },
    Residual { size: Rows, x: At, branch: At, y: At, real: Real },
}

impl Waiting {
    /// A product that may have gelu behind it: whole vectors, written and not added to.
    pub fn product(product: Product, operands: (At, At), into: At) -> Option<Self> {
        let whole = [product.rows, product.cols, product.inner].iter().all(|n| *n > 0 && n.is_multiple_of(8));
        let aligned = [operands.0, operands.1, into].iter().all(|at| at.is_multiple_of(16));
        let plain = (product.alpha, product.beta, product.lay.is_none()) == (1.0, 0.0, true);
        let narrow = (product.real, product.result) == (Real::Bf16, Real::Bf16);
        (whole && aligned && plain && narrow).then_some(Self::Product { product, operands, into })
    }

    /// Whether it still reads or writes some of these bytes.
    pub fn touches(&self, memory: &Range<At>) -> bool {
        let uses = |at: At, bytes: u64| at < memory.end && memory.start < at + bytes;
        match *self {
            Self::Product { product, operands: (a, b), into } => {
                let Product { rows, cols, inner, real, result, epilogue, .. } = product;
                let of_bias = match epilogue {
                    Epilogue::Bias { bias } => uses(bias, cols * result.bytes()),
                    _ => false,
                };
                of_bias
                    || uses(a, rows * inner * real.bytes())
                    || uses(b, inner * cols * real.bytes())
                    || uses(into, rows * cols * result.bytes())
            }
            Self::Residual { size, x, branch, y, real } => {
                let bytes = u64::from(size.rows) * u64::from(size.cols) * real.bytes();
                [x, branch, y].iter().any(|at| uses(*at, bytes))
            }
        }
    }

    /// With gelu behind it, whose input it leaves where its result would be: where the result goes to.
    pub fn with_gelu(self, x: At, len: u64, y: At) -> Option<(Product, (At, At), At)> {
        let Self::Product { product, operands, into } = self else { return None };
        let Epilogue::Bias { bias } = product.epilogue else { return None };
        let fits = into == x && product.rows * product.cols == len && y.is_multiple_of(16);
        fits.then_some((Product { epilogue: Epilogue::GeluBias { bias, before: x }, ..product }, operands, y))
    }

    /// With gelu's slope at `x` behind it.
    pub fn with_slope(self, x: At, len: u64, dy: At) -> Option<(Product, (At, At), At)> {
        let Self::Product { product, operands, into } = self else { return None };
        let fits = into == dy && product.rows * product.cols == len && x.is_multiple_of(16);
        (fits && product.epilogue == Epilogue::None).then_some((
            Product { epilogue: Epilogue::GeluSlope { before: x }, ..product },
            operands,
            dy,
        ))
    }

    /// What is added up to what a norm of this size reads: the trunk, and the branch.
    pub fn with_norm(self, of: Rows, at: At) -> Option<(At, At)> {
        match self {
            Self::Residual { size, x, branch, y, .. } if size == of && y == at => Some((x, branch)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product() -> Product {
        Product { epilogue: Epilogue::Bias { bias: 1 << 30 }, ..Product::new(16, 24, 32, Real::Bf16) }
    }

    #[test]
    fn a_product_waits_for_gelu_on_all_of_its_result() {
        let waiting = Waiting::product(product(), (1024, 4096), 8192).unwrap();
        let (fused, operands, into) = waiting.with_gelu(8192, 16 * 24, 16384).unwrap();
        assert_eq!((operands, into), ((1024, 4096), 16384));
        assert_eq!(fused.epilogue, Epilogue::GeluBias { bias: 1 << 30, before: 8192 });
        assert!(waiting.with_gelu(8192, 16 * 24 - 8, 16384).is_none(), "a part of it");
        assert!(waiting.with_gelu(1024, 16 * 24, 16384).is_none(), "another's");
        assert!(waiting.with_slope(512, 16 * 24, 8192).is_none(), "a bias lies between");
        let plain = Product { epilogue: Epilogue::None, ..product() };
        let waiting = Waiting::product(plain, (1024, 4096), 8192).unwrap();
        assert_eq!(
            waiting.with_slope(512, 16 * 24, 8192).unwrap().0.epilogue,
            Epilogue::GeluSlope { before: 512 }
        );
        for other in [
            Product { rows: 17, ..product() },
            Product { beta: 1.0, ..product() },
            Product { result: Real::F32, ..product() },
        ] {
            assert!(Waiting::product(other, (1024, 4096), 8192).is_none(), "{other:?}");
        }
        assert!(Waiting::product(product(), (1024, 4098), 8192).is_none());
    }

    #[test]
    fn what_is_still_used_is_known_to_the_byte() {
        let waiting = Waiting::product(product(), (1024, 4096), 8192).unwrap();
        // 16x32, 32x24 and 16x24 numbers of two bytes, and 24 of the bias.
        for (at, bytes) in [(1024, 1024), (4096, 1536), (8192, 768), (1 << 30, 48)] {
            assert!(waiting.touches(&(at..at + 1)) && waiting.touches(&(at + bytes - 1..at + bytes)));
            assert!(!waiting.touches(&(at + bytes..at + bytes + 16)) && !waiting.touches(&(at - 16..at)));
        }
        let size = Rows { rows: 3, cols: 5 };
        let waiting = Waiting::Residual { size, x: 100, branch: 200, y: 300, real: Real::F32 };
        assert!(waiting.touches(&(159..161)) && !waiting.touches(&(160..200)) && waiting.touches(&(0..1000)));
        assert_eq!(waiting.with_norm(size, 300), Some((100, 200)));
        assert_eq!(waiting.with_norm(size, 200), None);
        assert_eq!(waiting.with_norm(Rows { rows: 5, cols: 3 }, 300), None);
    }
}
