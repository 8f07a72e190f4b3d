//! Element types: a name and a width. Nothing here knows how to add two of them.

use std::fmt;
use std::str::FromStr;

/// The type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DType {
    F64,
    F32,
    Bf16,
    F16,
    F8E4M3,
    F8E5M2,
    I64,
    I32,
    I8,
    U8,
    Bool,
}

impl DType {
    pub const ALL: [DType; 11] = [
        DType::F64,
        DType::F32,
        DType::Bf16,
        DType::F16,
        DType::F8E4M3,
        DType::F8E5M2,
        DType::I64,
        DType::I32,
        DType::I8,
        DType::U8,
        DType::Bool,
    ];

    /// The width of an element.
    pub fn bytes(self) -> u64 {
        match self {
            DType::F64 | DType::I64 => 8,
            DType::F32 | DType::I32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::F8E4M3 | DType::F8E5M2 | DType::I8 | DType::U8 | DType::Bool => 1,
        }
    }

    /// Whether adding rounds, so that the order of a sum shows in its bits.
    pub fn rounds(self) -> bool {
        !matches!(self, DType::I64 | DType::I32 | DType::I8 | DType::U8 | DType::Bool)
    }

    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
            DType::F8E4M3 => "f8e4m3",
            DType::F8E5M2 => "f8e5m2",
            DType::I64 => "i64",
            DType::I32 => "i32",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::Bool => "bool",
        }
    }
}

impl DType {
    /// What torch, numpy, JAX and people call it; read, never written.
    pub fn other_names(self) -> &'static [&'static str] {
        match self {
            DType::F64 => &["float64", "fp64", "double"],
            DType::F32 => &["float32", "fp32", "float"],
            DType::Bf16 => &["bfloat16"],
            DType::F16 => &["float16", "fp16", "half"],
            DType::F8E4M3 => &["float8_e4m3fn", "f8e4m3fn"],
            DType::F8E5M2 => &["float8_e5m2"],
            DType::I64 => &["int64"],
            DType::I32 => &["int32"],
            DType::I8 => &["int8"],
            DType::U8 => &["uint8"],
            DType::Bool => &[],
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = ();

    fn from_str(s: &str) -> Result<Self, ()> {
        let named = |d: &DType| d.name() == s || d.other_names().contains(&s);
        DType::ALL.into_iter().find(named).ok_or(())
    }
}
