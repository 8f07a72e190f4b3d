//! CRC-32 as zip files have it, also of what is written in pieces and out of order.
//!
//! A checksum is a remainder of polynomials. So that of a whole is the sum, which is an exclusive or, of those of its pieces, each moved by the
//! bytes behind it: times x to the power of eight times their number, modulo the polynomial.
//!
//! ```text
//! crc(aaabbc)  =  crc(aaa)·x^(8·3)  +  crc(bb)·x^(8·1)  +  crc(c)
//! ```

/// Without its highest power, the lowest ones in the highest bits.
const POLYNOMIAL: u32 = 0xedb8_8320;

/// As zip files have it.
pub fn crc32(bytes: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32IsoHdlc, bytes) as u32
}

fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for bit in (0..32).rev() {
        if a >> bit & 1 == 1 {
            product ^= b;
        }
        b = if b & 1 == 1 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
    }
    product
}

/// Moves checksums before so many bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shift(u32);

impl Shift {
    fn by(mut bytes: u64) -> Self {
        // x^8, then its square, the square of that, ..
        let (mut power, mut product) = (1u32 << 23, 1u32 << 31);
        while bytes > 0 {
            if bytes & 1 == 1 {
                product = multiply(power, product);
            }
            power = multiply(power, power);
            bytes >>= 1;
        }
        Self(product)
    }
}

/// What pieces add to the checksum of a whole: told in the order in which they lie.
#[derive(Debug, Default)]
pub struct Pieces {
    sum: u32,
    /// Behind the last one.
    at: u64,
    /// Most pieces lie as far apart as the ones before.
    last: Option<(u64, Shift)>,
}

impl Pieces {
    pub fn add(&mut self, start: u64, bytes: &[u8]) {
        self.move_to(start + bytes.len() as u64);
        self.sum ^= crc32(bytes);
    }

    /// What they add to the whole that ends here. Those of all pieces, in any order, are combined by exclusive or.
    pub fn ending(mut self, end: u64) -> u32 {
        self.move_to(end);
        self.sum
    }

    fn move_to(&mut self, at: u64) {
        let bytes = at - self.at;
        if self.sum == 0 {
            self.at = at;
            return;
        }
        let (_, shift) = match self.last {
            Some(last) if last.0 == bytes => last,
            _ => *self.last.insert((bytes, Shift::by(bytes))),
        };
        (self.sum, self.at) = (multiply(shift.0, self.sum), at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crossmesh_testkit::seed::Seed;

    #[test]
    fn is_that_of_zip_files() {
        assert_eq!((crc32(b"3\n"), crc32(b"123456789"), crc32(b"")), (1_432_854_225, 0xcbf4_3926, 0));
    }

    #[test]
    fn pieces_in_any_order_make_the_checksum_of_the_whole() {
        let mut seed = Seed(8);
        for _ in 0..crossmesh_testkit::sweep::count(300) {
            let bytes: Vec<u8> = (0..seed.below(5000)).map(|_| seed.draw() as u8).collect();
            // Every byte goes to one of a few tiles; a tile's stretches are told in their order.
            let tiles = 1 + seed.below(4);
            let mut sums: Vec<Pieces> = (0..tiles).map(|_| Pieces::default()).collect();
            let mut at = 0;
            while at < bytes.len() {
                let end = (at + 1 + seed.below(200)).min(bytes.len());
                sums[seed.below(tiles)].add(at as u64, &bytes[at..end]);
                at = end;
            }
            let all = sums.into_iter().rev().map(|sum| sum.ending(bytes.len() as u64));
            assert_eq!(all.fold(0, |a, b| a ^ b), crc32(&bytes));
        }
    }
}
