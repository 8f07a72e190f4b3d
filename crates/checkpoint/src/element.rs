//! What a tensor's elements are called in each format, and how wide they are. Nothing here computes.

use std::fmt;
use std::str::FromStr;

/// The type of a tensor's elements: what torch and safetensors know, which is more than we compute with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Element {
    F64,
    F32,
    Bf16,
    F16,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    C128,
    C64,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

/// An element in all its names: ours, safetensors', torch's dtype and torch's storage class; and its width.
struct Row(Element, &'static str, Option<&'static str>, &'static str, Option<&'static str>, u64);

const TABLE: [Row; 18] = [
    Row(Element::F64, "f64", Some("F64"), "float64", Some("DoubleStorage"), 8),
    Row(Element::F32, "f32", Some("F32"), "float32", Some("FloatStorage"), 4),
    Row(Element::Bf16, "bf16", Some("BF16"), "bfloat16", Some("BFloat16Storage"), 2),
    Row(Element::F16, "f16", Some("F16"), "float16", Some("HalfStorage"), 2),
    Row(Element::F8E4M3, "f8e4m3", Some("F8_E4M3"), "float8_e4m3fn", None, 1),
    Row(Element::F8E5M2, "f8e5m2", Some("F8_E5M2"), "float8_e5m2", None, 1),
    Row(Element::F8E8M0, "f8e8m0", Some("F8_E8M0"), "float8_e8m0fnu", None, 1),
    Row(Element::C128, "c128", None, "complex128", Some("ComplexDoubleStorage"), 16),
    Row(Element::C64, "c64", Some("C64"), "complex64", Some("ComplexFloatStorage"), 8),
    Row(Element::I64, "i64", Some("I64"), "int64", Some("LongStorage"), 8),
    Row(Element::I32, "i32", Some("I32"), "int32", Some("IntStorage"), 4),
    Row(Element::I16, "i16", Some("I16"), "int16", Some("ShortStorage"), 2),
    Row(Element::I8, "i8", Some("I8"), "int8", Some("CharStorage"), 1),
    Row(Element::U64, "u64", Some("U64"), "uint64", None, 8),
    Row(Element::U32, "u32", Some("U32"), "uint32", None, 4),
    Row(Element::U16, "u16", Some("U16"), "uint16", None, 2),
    Row(Element::U8, "u8", Some("U8"), "uint8", Some("ByteStorage"), 1),
    Row(Element::Bool, "bool", Some("BOOL"), "bool", Some("BoolStorage"), 1),
];

impl Element {
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
        &TABLE[self as usize]
    }

    /// The width of an element.
    pub fn bytes(self) -> u64 {
        self.row().5
    }

    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// What safetensors calls it; None where it has no name for it.
    pub fn safetensors(self) -> Option<&'static str> {
        self.row().2
    }

    /// The attribute of the module `torch`.
    pub fn torch(self) -> &'static str {
        self.row().3
    }

    /// torch's typed storage, where there is one; the others are untyped.
    pub fn storage(self) -> Option<&'static str> {
        self.row().4
    }

    pub fn of_safetensors(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|e| e.safetensors() == Some(name))
    }

    pub fn of_torch(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|e| e.torch() == name)
    }

    pub fn of_storage(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|e| e.storage() == Some(name))
    }

    /// A real number that can be rounded to another: f64, f32, bf16 or f16.
    pub fn is_real(self) -> bool {
        matches!(self, Element::F64 | Element::F32 | Element::Bf16 | Element::F16)
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
        let named = |e: &Element| e.name() == s || e.torch() == s || e.safetensors() == Some(s);
        Self::ALL.into_iter().find(named).ok_or(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_where_its_element_says() {
        for element in Element::ALL {
            assert_eq!(element.row().0, element);
            assert_eq!(element.name().parse(), Ok(element));
            assert_eq!(Element::of_torch(element.torch()), Some(element));
        }
    }
}
