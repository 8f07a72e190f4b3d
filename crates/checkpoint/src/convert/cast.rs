//! Rounding one real type to another, as torch does: to the nearest, ties to even.

use half::{bf16, f16};

use crate::element::Element;

/// Fills `to` with the numbers of `from`.
pub fn cast(from_type: Element, from: &[u8], to_type: Element, to: &mut [u8]) {
    match from_type {
        Element::F64 => write(from, f64::from_le_bytes, to_type, to),
        Element::F32 => write(from, |b| f64::from(f32::from_le_bytes(b)), to_type, to),
        Element::BF16 => write(from, |b| f64::from(bf16::from_le_bytes(b)), to_type, to),
        Element::F16 => write(from, |b| f64::from(f16::from_le_bytes(b)), to_type, to),
        other => unreachable!("{other} is not rounded"),
    }
}

fn write<const N: usize>(from: &[u8], read: impl Fn([u8; N]) -> f64, to_type: Element, to: &mut [u8]) {
    match to_type {
        Element::F64 => each(from, to, |b| read(b).to_le_bytes()),
        Element::F32 => each(from, to, |b| (read(b) as f32).to_le_bytes()),
        // By way of f32, as torch rounds doubles.
        Element::BF16 => each(from, to, |b| bf16::from_f32(read(b) as f32).to_le_bytes()),
        Element::F16 => each(from, to, |b| f16::from_f32(read(b) as f32).to_le_bytes()),
        other => unreachable!("nothing is rounded to {other}"),
    }
}

fn each<const N: usize, const M: usize>(from: &[u8], to: &mut [u8], number: impl Fn([u8; N]) -> [u8; M]) {
    let (from, to) = (from.as_chunks::<N>().0, to.as_chunks_mut::<M>().0);
    from.iter().zip(to).for_each(|(from, to)| *to = number(*from));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_and_narrowing_gives_the_same_bits() {
        let bits: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        for (narrow, wide, width) in [
            (Element::BF16, Element::F32, 4),
            (Element::F16, Element::F32, 4),
            (Element::BF16, Element::F64, 8),
        ] {
            let mut wider = vec![0; bits.len() / 2 * width];
            cast(narrow, &bits, wide, &mut wider);
            let mut back = vec![0; bits.len()];
            cast(wide, &wider, narrow, &mut back);
            let same = |(a, b): (&[u8; 2], &[u8; 2])| {
                // Which NaN it is may change; that it is one, not.
                let nan = |x: &[u8; 2]| {
                    let bits = u16::from_le_bytes(*x);
                    if narrow == Element::F16 {
                        f16::from_bits(bits).is_nan()
                    } else {
                        bf16::from_bits(bits).is_nan()
                    }
                };
                a == b || (nan(a) && nan(b))
            };
            assert!(bits.as_chunks().0.iter().zip(back.as_chunks().0).all(same));
        }
    }
}
