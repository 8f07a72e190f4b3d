//! Meshes: named axes over an ordered list of ranks, row-major.
//!
//! ```
//! use crossmesh_core::mesh::Mesh;
//! let mesh: Mesh = "A{dp:2,tp:4}".parse().unwrap();
//! assert_eq!(mesh.len(), 8);
//! assert_eq!(mesh.coord(5), [1, 1]); // the second row, the second column
//! assert_eq!("B{tp:3}=4,6-7".parse::<Mesh>().unwrap().to_string(), "B{tp:3}=4,6-7");
//! assert_eq!("C:2x4".parse::<Mesh>().unwrap().to_string(), "C{x:2,y:4}"); // sizes alone, as Alpa writes them
//! ```

use std::fmt;
use std::str::FromStr;

use crate::id::Rank;
use crate::layout::notation::{Cursor, NotationError};

/// More devices than this in one mesh is taken for a typing mistake rather than planned for.
pub const MAX_MESH_LEN: u64 = 1 << 20;
/// The most axes a mesh may have.
pub const MAX_AXES: usize = 32;

/// A named dimension of a mesh.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Axis {
    pub name: String,
    pub len: u32,
}

/// Named axes over an ordered list of ranks. Its ranks are either listed, or the next free ones when it is placed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Mesh {
    pub(crate) name: String,
    pub(crate) axes: Vec<Axis>,
    pub(crate) ranks: Option<Vec<Rank>>,
}

impl Mesh {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn axes(&self) -> &[Axis] {
        &self.axes
    }

    /// The ranks the notation listed, if it did.
    pub fn listed_ranks(&self) -> Option<&[Rank]> {
        self.ranks.as_deref()
    }

    /// Devices in the mesh; a mesh without axes is one device.
    pub fn len(&self) -> usize {
        self.axes.iter().map(|a| a.len as usize).product()
    }

    pub fn is_empty(&self) -> bool {
        false
    }

    /// The length of the last axis, which by default is what a host holds.
    pub fn last_axis_len(&self) -> u32 {
        self.axes.last().map_or(1, |a| a.len)
    }

    /// The coordinate of the device at `position` in row-major order.
    pub fn coord(&self, position: usize) -> Vec<u32> {
        let mut rest = position;
        let mut coord = vec![0; self.axes.len()];
        for (c, axis) in coord.iter_mut().zip(&self.axes).rev() {
            *c = (rest % axis.len as usize) as u32;
            rest /= axis.len as usize;
        }
        coord
    }

    /// The position, in row-major order, of the device at `coord`.
    pub fn position(&self, coord: &[u32]) -> usize {
        self.axes.iter().zip(coord).fold(0, |at, (axis, &c)| at * axis.len as usize + c as usize)
    }

    /// The same ranks with one axis cut into several, major first.
    ///
    /// ```
    /// # use crossmesh_core::mesh::Mesh;
    /// let mesh: Mesh = "A{dp:2,tp:6}".parse().unwrap();
    /// let refined = mesh.refined("tp", &[("kv", 3), ("g", 2)]).unwrap();
    /// assert_eq!(refined.to_string(), "A{dp:2,kv:3,g:2}");
    /// assert_eq!((mesh.coord(9), refined.coord(9)), (vec![1, 3], vec![1, 1, 1]));
    /// assert_eq!(mesh.refined("tp", &[("kv", 4)]), None); // 4 is not 6
    /// ```
    pub fn refined(&self, axis: &str, parts: &[(&str, u32)]) -> Option<Self> {
        let at = self.axis_index(axis)?;
        let len = parts.iter().try_fold(1u32, |len, (_, part)| len.checked_mul(*part))?;
        let known = |name: &str| self.axes.iter().any(|a| a.name == name && a.name != axis);
        if len != self.axes[at].len || parts.iter().any(|(name, _)| known(name)) {
            return None;
        }
        let mut mesh = self.clone();
        let parts = parts.iter().map(|(name, len)| Axis { name: (*name).into(), len: *len });
        mesh.axes.splice(at..=at, parts);
        (mesh.axes.len() <= MAX_AXES).then_some(mesh)
    }

    pub fn axis_index(&self, name: &str) -> Option<usize> {
        self.axes.iter().position(|a| a.name == name)
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{{", self.name)?;
        for (i, axis) in self.axes.iter().enumerate() {
            write!(f, "{}{}:{}", if i == 0 { "" } else { "," }, axis.name, axis.len)?;
        }
        f.write_str("}")?;
        match &self.ranks {
            Some(ranks) => write!(f, "={}", RankList(ranks)),
            None => Ok(()),
        }
    }
}

impl FromStr for Mesh {
    type Err = NotationError;

    fn from_str(s: &str) -> Result<Self, NotationError> {
        let mut cursor = Cursor::new(s);
        let mesh = cursor.mesh()?;
        cursor.finish()?;
        Ok(mesh)
    }
}

/// Prints ranks as runs: `0-3,8,10-11`.
pub struct RankList<'a>(pub &'a [Rank]);

impl fmt::Display for RankList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0;
        while let Some(first) = rest.first() {
            // Counted in u64: the rank after the last one need not exist.
            let run = rest.iter().zip(u64::from(first.0)..).take_while(|(r, n)| u64::from(r.0) == *n).count();
            let comma = if rest.len() == self.0.len() { "" } else { "," };
            match run {
                1 => write!(f, "{comma}{}", first.0)?,
                _ => write!(f, "{comma}{}-{}", first.0, rest[run - 1].0)?,
            }
            rest = &rest[run..];
        }
        Ok(())
    }
}
