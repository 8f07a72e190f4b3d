//! Digests of arrays: what a publisher sent and what a subscriber got are compared by them.
//!
//! The bytes of the elements, row by row, whatever the strides, by BLAKE3. Rows that are short are put together first: its vectors want
//! 16 KiB at a time.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::dlpack;
use crate::errors::ArrayError;

/// What is gathered of short rows before it is hashed.
const GATHER_BYTES: usize = 64 << 10;
const DIGEST_BYTES: usize = 16;

/// Rows of bytes in memory of somebody's: the lengths and steps of the outer dims, and how long a row is.
struct Rows {
    address: u64,
    outer: Vec<(u64, u64)>,
    row_bytes: u64,
}

/// 16 bytes for each of some numpy arrays, of any strides. Nobody may write to them meanwhile.
#[pyfunction]
pub fn digests<'py>(py: Python<'py>, arrays: Vec<Bound<'py, PyAny>>) -> PyResult<Vec<Bound<'py, PyBytes>>> {
    let rows = arrays.iter().map(Rows::of).collect::<PyResult<Vec<_>>>()?;
    let found: Vec<[u8; DIGEST_BYTES]> = py.detach(|| rows.iter().map(Rows::digest).collect());
    Ok(found.iter().map(|digest| PyBytes::new(py, digest)).collect())
}

impl Rows {
    fn of(array: &Bound<'_, PyAny>) -> PyResult<Self> {
        let interface = array.getattr("__array_interface__")?;
        let part = |key: &str| interface.get_item(key);
        let (address, _): (u64, bool) = part("data")?.extract()?;
        let shape: Vec<u64> = part("shape")?.extract()?;
        let width: u64 = array.getattr("itemsize")?.extract()?;
        let strides: Option<Vec<i64>> = part("strides").ok().and_then(|s| s.extract().ok()).flatten();
        if shape.contains(&0) {
            return Ok(Self { address, outer: vec![], row_bytes: 0 });
        }
        let (mut outer, mut row_bytes) = (vec![], width);
        for (dim, len) in shape.iter().enumerate().rev().filter(|(_, len)| **len > 1) {
            let Some(strides) = &strides else {
                row_bytes *= len;
                continue;
            };
            let step = u64::try_from(strides[dim]);
            let step = step
                .map_err(|_| ArrayError::new_err(format!("strides {strides:?} of a digest go backwards")))?;
            if outer.is_empty() && step == row_bytes {
                row_bytes *= len;
            } else {
                outer.push((*len, step));
            }
        }
        outer.reverse();
        Ok(Self { address, outer, row_bytes })
    }

    fn digest(&self) -> [u8; DIGEST_BYTES] {
        let mut hasher = blake3::Hasher::new();
        let mut gathered = Vec::with_capacity(GATHER_BYTES);
        self.each(&self.outer, self.address, &mut |row| {
            if gathered.len() + row.len() > GATHER_BYTES {
                hasher.update(&gathered);
                gathered.clear();
            }
            if row.len() >= GATHER_BYTES {
                hasher.update(row);
            } else {
                gathered.extend_from_slice(row);
            }
        });
        hasher.update(&gathered);
        let mut digest = [0; DIGEST_BYTES];
        digest.copy_from_slice(&hasher.finalize().as_bytes()[..DIGEST_BYTES]);
        digest
    }

    fn each(&self, outer: &[(u64, u64)], address: u64, then: &mut impl FnMut(&[u8])) {
        match outer {
            [] => then(dlpack::bytes_of(address, self.row_bytes, self)),
            [(len, step), inner @ ..] => (0..*len).for_each(|i| self.each(inner, address + i * step, then)),
        }
    }
}
