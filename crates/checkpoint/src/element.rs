//! What a tensor's elements are called in each format. Nothing here computes.
//!
//! Names and widths are core's, for every type that we compute with or move; the few that only files have are listed here.

use std::fmt;
use std::str::FromStr;

use crossmesh_core::dtype::DType;

/// The type of a tensor's elements: what torch and safetensors know, which is more than we compute with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    /// One of ours.
    Of(DType),
    F8E8M0,
    C128,
    C64,
    I16,
    U64,
    U32,
    U16,
}

/// An element in the names of others: safetensors', torch's dtype and torch's storage class.
struct Row(Element, Option<&'static str>, &'static str, Option<&'static str>);

const TABLE: [Row; 18] = [
    Row(Element::F64, Some("F64"), "float64", Some("DoubleStorage")),
    Row(Element::F32, Some("F32"), "float32", Some("FloatStorage")),
    Row(Element::BF16, Some("BF16"), "bfloat16", Some("BFloat16Storage")),
    Row(Element::F16, Some("F16"), "float16", Some("HalfStorage")),
    Row(Element::F8E4M3, Some("F8_E4M3"), "float8_e4m3fn", None),
    Row(Element::F8E5M2, Some("F8_E5M2"), "float8_e5m2", None),
    Row(Element::F8E8M0, Some("F8_E8M0"), "float8_e8m0fnu", None),
    Row(Element::C128, None, "complex128", Some("ComplexDoubleStorage")),
    Row(Element::C64, Some("C64"), "complex64", Some("ComplexFloatStorage")),
    Row(Element::I64, Some("I64"), "int64", Some("LongStorage")),
    Row(Element::I32, Some("I32"), "int32", Some("IntStorage")),
    Row(Element::I16, Some("I16"), "int16", Some("ShortStorage")),
    Row(Element::I8, Some("I8"), "int8", Some("CharStorage")),
    Row(Element::U64, Some("U64"), "uint64", None),
    Row(Element::U32, Some("U32"), "uint32", None),
    Row(Element::U16, Some("U16"), "uint16", None),
    Row(Element::U8, Some("U8"), "uint8", Some("ByteStorage")),
    Row(Element::BOOL, Some("BOOL"), "bool", Some("BoolStorage")),
];

impl Element {
    pub const F64: Self = Element::Of(DType::F64);
    pub const F32: Self = Element::Of(DType::F32);
    pub const BF16: Self = Element::Of(DType::Bf16);
    pub const F16: Self = Element::Of(DType::F16);
    pub const F8E4M3: Self = Element::Of(DType::F8E4M3);
    pub const F8E5M2: Self = Element::Of(DType::F8E5M2);
    pub const I64: Self = Element::Of(DType::I64);
    pub const I32: Self = Element::Of(DType::I32);
    pub const I8: Self = Element::Of(DType::I8);
    pub const U8: Self = Element::Of(DType::U8);
    pub const BOOL: Self = Element::Of(DType::Bool);

    pub const ALL: [Element; 18] = {
        let mut all = [Element::F64; 18];
        let mut i = 0;
        while i < all.len() {
            all[i] = TABLE[i].0;
            i += 1;
        }
        all
    };

    fn row(self) -> &'static Row {
        TABLE.iter().find(|row| row.0 == self).expect("every element has a row")
    }

    fn find(is: impl Fn(&Row) -> bool) -> Option<Self> {
        TABLE.iter().find(|row| is(row)).map(|row| row.0)
    }

    /// The width of an element.
    pub fn bytes(self) -> u64 {
        match self {
            Element::Of(dtype) => dtype.bytes(),
            Element::C128 => 16,
            Element::C64 | Element::U64 => 8,
            Element::U32 => 4,
            Element::I16 | Element::U16 => 2,
            Element::F8E8M0 => 1,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Element::Of(dtype) => dtype.name(),
            Element::F8E8M0 => "f8e8m0",
            Element::C128 => "c128",
            Element::C64 => "c64",
            Element::I16 => "i16",
            Element::U64 => "u64",
            Element::U32 => "u32",
            Element::U16 => "u16",
        }
    }

    /// What safetensors calls it; None where it has no name for it.
    pub fn safetensors(self) -> Option<&'static str> {
        self.row().1
    }

    /// The attribute of the module `torch`.
    pub fn torch(self) -> &'static str {
        self.row().2
    }

    /// torch's typed storage, where there is one; the others are untyped.
    pub fn storage(self) -> Option<&'static str> {
        self.row().3
    }

    pub fn of_safetensors(name: &str) -> Option<Self> {
        Self::find(|row| row.1 == Some(name))
    }

    pub fn of_torch(name: &str) -> Option<Self> {
        Self::find(|row| row.2 == name)
    }

    pub fn of_storage(name: &str) -> Option<Self> {
        Self::find(|row| row.3 == Some(name))
    }

    /// A real number that can be rounded to another: f64, f32, bf16 or f16.
    pub fn is_real(self) -> bool {
        matches!(self, Element::F64 | Element::F32 | Element::BF16 | Element::F16)
    }

    /// Whether every number of this type is one of the other, bit by bit and back.
    pub fn widens_to(self, other: Element) -> bool {
        self == other || (self.is_real() && other.is_real() && self.bytes() < other.bytes())
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Element {
    type Err = ();

    /// Ours, torch's or safetensors' name.
    fn from_str(s: &str) -> Result<Self, ()> {
        let named = |row: &Row| row.0.name() == s || row.2 == s || row.1 == Some(s);
        Self::find(named).or_else(|| s.parse().ok().map(Element::Of)).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_has_one_row_and_reads_its_own_names() {
        for element in Element::ALL {
            assert_eq!(element.name().parse(), Ok(element));
            assert_eq!(Element::of_torch(element.torch()), Some(element));
        }
        for dtype in DType::ALL {
            let element = Element::Of(dtype);
            assert_eq!(element.row().0, element);
            assert!(dtype.other_names().iter().all(|name| name.parse() == Ok(element)), "{dtype}");
        }
    }
}
