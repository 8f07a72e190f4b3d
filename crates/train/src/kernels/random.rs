//! Random numbers that have an address.
//!
//! A draw is a function of (seed, step, site, index): Philox 4x32-10 (Salmon et al., SC'11) with the seed as its key and the
//! rest as its counter. Whoever holds element `index` of a tensor draws the same number for it, so a dropout mask or an
//! initial weight does not depend on how the tensor is split, nor on who computes what first.

/// One sequence of draws, addressed by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    key: [u32; 2],
    /// The upper half of the counter.
    high: [u32; 2],
}

impl Stream {
    /// The draws of one place in a model (`site`) at one step.
    pub fn new(seed: u64, step: u64, site: u32) -> Self {
        // A step above 2^32 would share its draws with one 2^32 steps before; nobody trains that long.
        Self { key: halves(seed), high: [site, step as u32] }
    }

    /// The draws that belong to a name.
    pub fn named(seed: u64, name: &str) -> Self {
        Self { key: halves(seed ^ 0x9e37_79b9_7f4a_7c15), high: halves(fnv1a(name.as_bytes())) }
    }

    /// Its key, and the upper half of its counter: for kernels that draw elsewhere.
    pub fn words(&self) -> ([u32; 2], [u32; 2]) {
        (self.key, self.high)
    }

    /// Four draws: those with the indices `4 * block` to `4 * block + 3`.
    #[inline(always)]
    pub fn block(&self, block: u64) -> [u32; 4] {
        let [low, high] = halves(block);
        philox([low, high, self.high[0], self.high[1]], self.key)
    }

    /// The draws of `N` blocks in a row, side by side: `[j][i]` is draw `4 * (first + i) + j`. Vector code.
    #[inline(always)]
    #[expect(clippy::needless_range_loop, reason = "four arrays in step, lane by lane")]
    pub fn blocks<const N: usize>(&self, first: u64) -> [[u32; N]; 4] {
        let mut c = [[0; N], [0; N], [self.high[0]; N], [self.high[1]; N]];
        for i in 0..N {
            [c[0][i], c[1][i]] = halves(first.wrapping_add(i as u64));
        }
        let mut key = self.key;
        for _ in 0..10 {
            let old = c;
            for i in 0..N {
                let (p, q) = (u64::from(old[0][i]) * M0, u64::from(old[2][i]) * M1);
                c[0][i] = (q >> 32) as u32 ^ old[1][i] ^ key[0];
                c[1][i] = q as u32;
                c[2][i] = (p >> 32) as u32 ^ old[3][i] ^ key[1];
                c[3][i] = p as u32;
            }
            key = next_key(key);
        }
        c
    }

    /// The draw at an index.
    pub fn at(&self, index: u64) -> u32 {
        self.block(index / 4)[(index % 4) as usize]
    }

    /// A number from the standard normal distribution, by Box and Muller. Each index has a block of its own.
    pub fn normal(&self, index: u64) -> f64 {
        let [a, b, c, d] = self.block(index);
        // In (0, 1], so that the logarithm exists; 53 bits each.
        let unit = |high: u32, low: u32| {
            ((u64::from(high) << 21 | u64::from(low) >> 11) + 1) as f64 * (0.5f64).powi(53)
        };
        let radius = (-2.0 * unit(a, b).ln()).sqrt();
        radius * (std::f64::consts::TAU * unit(c, d)).cos()
    }
}

/// Draws below this are dropped.
pub fn threshold(rate: f64) -> u32 {
    (rate * 4_294_967_296.0).clamp(0.0, 4_294_967_295.0) as u32
}

#[inline(always)]
fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

const M0: u64 = 0xD251_1F53;
const M1: u64 = 0xCD9E_8D57;

#[inline(always)]
fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)]
}

#[inline(always)]
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let [low0, high0] = halves(u64::from(counter[0]) * M0);
        let [low1, high1] = halves(u64::from(counter[2]) * M1);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = next_key(key);
    }
    counter
}

/// A hash that is the same everywhere and always.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers published with Random123.
    #[test]
    fn philox_gives_the_published_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn every_address_has_its_own_draws() {
        let draws = |seed, step, site| Stream::new(seed, step, site).block(7);
        let base = draws(1, 2, 3);
        assert_eq!(base, draws(1, 2, 3));
        for other in [draws(2, 2, 3), draws(1, 3, 3), draws(1, 2, 4), Stream::new(1, 2, 3).block(8)] {
            assert_ne!(base, other);
        }
        assert_ne!(Stream::named(1, "wte").block(0), Stream::named(1, "wpe").block(0));
        assert_eq!(Stream::new(1, 2, 3).at(30), base[2]);
    }

    #[test]
    fn blocks_side_by_side_are_the_same_draws() {
        let stream = Stream::new(9, 8, 7);
        for first in [0, 5, u64::from(u32::MAX) - 3] {
            let side_by_side = stream.blocks::<8>(first);
            let block = |i: usize| std::array::from_fn(|j| side_by_side[j][i]);
            (0..8).for_each(|i| assert_eq!(stream.block(first + i as u64), block(i)));
        }
    }

    #[test]
    fn normal_draws_have_mean_zero_and_deviation_one() {
        let stream = Stream::named(5, "a weight");
        let draws: Vec<f64> = (0..20_000).map(|i| stream.normal(i)).collect();
        let mean = draws.iter().sum::<f64>() / 2e4;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 2e4;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }
}
