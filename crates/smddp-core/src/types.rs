//! Element types and reductions, with the numbers that travel in headers and from Python.

/// Element type of a call. `Opaque` moves bytes of any torch dtype (float8, quantised, ...) and cannot reduce.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum DType {
    F32 = 0,
    F64 = 1,
    F16 = 2,
    BF16 = 3,
    I8 = 4,
    I16 = 5,
    I32 = 6,
    I64 = 7,
    U8 = 8,
    U16 = 9,
    U32 = 10,
    U64 = 11,
    Bool = 12,
    C64 = 13,
    C128 = 14,
    Opaque1 = 15,
    Opaque2 = 16,
    Opaque4 = 17,
    Opaque8 = 18,
    Opaque16 = 19,
    /// Complex of two f16 (torch.complex32): moves, does not reduce.
    C32 = 20,
}

impl DType {
    pub const ALL: [DType; 21] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::Bool,
        DType::C64,
        DType::C128,
        DType::Opaque1,
        DType::Opaque2,
        DType::Opaque4,
        DType::Opaque8,
        DType::Opaque16,
        DType::C32,
    ];

    pub fn from_u8(code: u8) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::I8 | DType::U8 | DType::Bool | DType::Opaque1 => 1,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 | DType::Opaque2 => 2,
            DType::F32 | DType::I32 | DType::U32 | DType::Opaque4 | DType::C32 => 4,
            DType::F64 | DType::I64 | DType::U64 | DType::C64 | DType::Opaque8 => 8,
            DType::C128 | DType::Opaque16 => 16,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "float32",
            DType::F64 => "float64",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::I8 => "int8",
            DType::I16 => "int16",
            DType::I32 => "int32",
            DType::I64 => "int64",
            DType::U8 => "uint8",
            DType::U16 => "uint16",
            DType::U32 => "uint32",
            DType::U64 => "uint64",
            DType::Bool => "bool",
            DType::C64 => "complex64",
            DType::C128 => "complex128",
            DType::Opaque1 => "opaque8",
            DType::Opaque2 => "opaque16",
            DType::Opaque4 => "opaque32",
            DType::Opaque8 => "opaque64",
            DType::Opaque16 => "opaque128",
            DType::C32 => "complex32",
        }
    }

    /// 16-bit floats: sums accumulate in f32 and round once.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }
}

/// Reduction of a call. `Avg` is the sum divided by the number of ranks; `PremulSum` multiplies each rank's
/// input by a factor first, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RedOp {
    Sum,
    Avg,
    PremulSum(f64),
    Min,
    Max,
    Prod,
    Band,
    Bor,
    Bxor,
}

impl RedOp {
    pub const fn code(self) -> u8 {
        match self {
            RedOp::Sum => 0,
            RedOp::Avg => 1,
            RedOp::PremulSum(_) => 2,
            RedOp::Min => 3,
            RedOp::Max => 4,
            RedOp::Prod => 5,
            RedOp::Band => 6,
            RedOp::Bor => 7,
            RedOp::Bxor => 8,
        }
    }

    pub fn from_code(code: u8, factor: f64) -> Option<Self> {
        Some(match code {
            0 => RedOp::Sum,
            1 => RedOp::Avg,
            2 => RedOp::PremulSum(factor),
            3 => RedOp::Min,
            4 => RedOp::Max,
            5 => RedOp::Prod,
            6 => RedOp::Band,
            7 => RedOp::Bor,
            8 => RedOp::Bxor,
            _ => return None,
        })
    }

    pub const fn name(self) -> &'static str {
        match self {
            RedOp::Sum => "sum",
            RedOp::Avg => "avg",
            RedOp::PremulSum(_) => "premul_sum",
            RedOp::Min => "min",
            RedOp::Max => "max",
            RedOp::Prod => "prod",
            RedOp::Band => "band",
            RedOp::Bor => "bor",
            RedOp::Bxor => "bxor",
        }
    }
}
