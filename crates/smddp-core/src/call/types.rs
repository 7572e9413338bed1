//! Element types and reductions, with the codes that fingerprints and Python use.

macro_rules! dtypes {
    ($($(#[$doc:meta])* $dtype:ident = $code:literal, $bytes:literal, $name:literal;)*) => {
        /// Element type of a call. `Opaque` types move the bytes of any torch dtype (float8, quantised, ...) and
        /// support no reduction.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum DType { $($(#[$doc])* $dtype = $code),* }

        impl DType {
            pub const ALL: [DType; [$($code),*].len()] = [$(DType::$dtype),*];

            /// Bytes of one element.
            pub const fn size(self) -> usize {
                match self { $(DType::$dtype => $bytes),* }
            }

            pub const fn name(self) -> &'static str {
                match self { $(DType::$dtype => $name),* }
            }
        }
    };
}

// Code, bytes, name.
dtypes! {
    #[default]
    F32 = 0, 4, "float32";
    F64 = 1, 8, "float64";
    F16 = 2, 2, "float16";
    BF16 = 3, 2, "bfloat16";
    I8 = 4, 1, "int8";
    I16 = 5, 2, "int16";
    I32 = 6, 4, "int32";
    I64 = 7, 8, "int64";
    U8 = 8, 1, "uint8";
    U16 = 9, 2, "uint16";
    U32 = 10, 4, "uint32";
    U64 = 11, 8, "uint64";
    Bool = 12, 1, "bool";
    C64 = 13, 8, "complex64";
    C128 = 14, 16, "complex128";
    Opaque1 = 15, 1, "opaque8";
    Opaque2 = 16, 2, "opaque16";
    Opaque4 = 17, 4, "opaque32";
    Opaque8 = 18, 8, "opaque64";
    Opaque16 = 19, 16, "opaque128";
    /// Complex number of two f16 (torch.complex32). Supports no reduction.
    C32 = 20, 4, "complex32";
}

impl DType {
    pub fn from_u8(code: u8) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }

    pub const fn is_integer(self) -> bool {
        use DType::{I8, I16, I32, I64, U8, U16, U32, U64};
        matches!(self, I8 | I16 | I32 | I64 | U8 | U16 | U32 | U64)
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
    /// For integers: the sum modulo 2^bits, divided and truncated. Partial sums have the element type.
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
        use RedOp::{Avg, Band, Bor, Bxor, Max, Min, PremulSum, Prod, Sum};
        let all = [Sum, Avg, PremulSum(factor), Min, Max, Prod, Band, Bor, Bxor];
        all.get(code as usize).copied()
    }

    pub const fn name(self) -> &'static str {
        ["sum", "avg", "premul_sum", "min", "max", "prod", "band", "bor", "bxor"][self.code() as usize]
    }
}
