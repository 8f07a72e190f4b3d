//! The checksum of frames: crc32c, of bytes that come in parts.
//!
//! Every byte that goes over a wire is summed up twice, so this is a part of what a byte costs: of an all-reduce over loopback a
//! quarter, by the processor's own crc instruction. Carry-less products of wide vectors take half of that. To begin with those costs as
//! much as summing up some hundred bytes, though: headers and short words are left to the instruction.

use crc_fast::{CrcAlgorithm, Digest};

/// Fewer are summed up by the processor's instruction.
const SHORT_BYTES: usize = 256;
/// What a register starts with, and is turned over by at the end.
const ONES: u32 = u32::MAX;

/// Of some bytes.
pub fn crc32c(bytes: &[u8]) -> u32 {
    append(0, bytes)
}

/// Of all bytes so far and these.
pub fn append(so_far: u32, bytes: &[u8]) -> u32 {
    if bytes.len() < SHORT_BYTES {
        return ::crc32c::crc32c_append(so_far, bytes);
    }
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(so_far ^ ONES));
    digest.update(bytes);
    digest.finalize() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn it_is_crc32c() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283, "RFC 3720's check value");
        assert_eq!((crc32c(&[]), append(7, &[])), (0, 7));
    }

    proptest! {
        /// Of any length, cut anywhere, it is what the processor's instruction makes of it.
        #[test]
        fn it_is_what_another_implementation_computes(
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            cut in 0usize..3000,
        ) {
            let cut = cut.min(bytes.len());
            prop_assert_eq!(crc32c(&bytes), ::crc32c::crc32c(&bytes));
            prop_assert_eq!(append(crc32c(&bytes[..cut]), &bytes[cut..]), ::crc32c::crc32c(&bytes));
        }
    }
}
