//! Element types and reductions, with the codes that fingerprints and Python use.

macro_rules! dtypes {
    ($($(#[$doc:meta])* $dtype:ident = $code:literal, $bytes:literal, $name:literal;)*) => {
        /// Element type of a call. `Opaque` types move the bytes of any torch dtype (float8, quantised, ...) and
        /// support no reduction.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum DType { $($(#[$doc])* $dtype = $code),* }

        impl DType {
            /// All element types, by code.
            pub const ALL: [DType; [$($code),*].len()] = [$(DType::$dtype),*];

            /// Returns the bytes of one element.
            pub const fn size(self) -> usize {
                match self { $(DType::$dtype => $bytes),* }
            }

            /// Returns the name, as in torch; "opaque8" and others for opaque elements.
            pub const fn name(self) -> &'static str {
                match self { $(DType::$dtype => $name),* }
            }
        }
    };
}

// Code, bytes, name.
dtypes! {
    /// 32-bit float.
    #[default]
    F32 = 0, 4, "float32";
    /// 64-bit float.
    F64 = 1, 8, "float64";
    /// 16-bit float (IEEE 754).
    F16 = 2, 2, "float16";
    /// 16-bit float with the exponent of a 32-bit float (bfloat16).
    BF16 = 3, 2, "bfloat16";
    /// Signed 8-bit integer.
    I8 = 4, 1, "int8";
    /// Signed 16-bit integer.
    I16 = 5, 2, "int16";
    /// Signed 32-bit integer.
    I32 = 6, 4, "int32";
    /// Signed 64-bit integer.
    I64 = 7, 8, "int64";
    /// Unsigned 8-bit integer.
    U8 = 8, 1, "uint8";
    /// Unsigned 16-bit integer.
    U16 = 9, 2, "uint16";
    /// Unsigned 32-bit integer.
    U32 = 10, 4, "uint32";
    /// Unsigned 64-bit integer.
    U64 = 11, 8, "uint64";
    /// Bool of one byte: 0 or 1.
    Bool = 12, 1, "bool";
    /// Complex number of two 32-bit floats.
    C64 = 13, 8, "complex64";
    /// Complex number of two 64-bit floats.
    C128 = 14, 16, "complex128";
    /// Any element of 1 byte.
    Opaque1 = 15, 1, "opaque8";
    /// Any element of 2 bytes.
    Opaque2 = 16, 2, "opaque16";
    /// Any element of 4 bytes.
    Opaque4 = 17, 4, "opaque32";
    /// Any element of 8 bytes.
    Opaque8 = 18, 8, "opaque64";
    /// Any element of 16 bytes.
    Opaque16 = 19, 16, "opaque128";
    /// Complex number of two f16 (torch.complex32). Supports no reduction.
    C32 = 20, 4, "complex32";
}

impl DType {
    /// Returns the element type of a code.
    pub fn from_u8(code: u8) -> Option<Self> {
        Self::ALL.get(code as usize).copied()
    }

    /// Returns true for integers. A bool is none.
    pub const fn is_integer(self) -> bool {
        use DType::{I8, I16, I32, I64, U8, U16, U32, U64};
        matches!(self, I8 | I16 | I32 | I64 | U8 | U16 | U32 | U64)
    }

    /// Returns true for 16-bit floats: sums accumulate in f32 and round once.
    pub const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }
}

/// Reduction of a call. `Avg` is the sum divided by the number of ranks; `PremulSum` multiplies each rank's
/// input by a factor first, the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RedOp {
    /// Sum.
    Sum,
    /// For integers: the sum modulo 2^bits, divided and truncated. Partial sums have the element type.
    Avg,
    /// Sum of the inputs times this factor.
    PremulSum(f64),
    /// Minimum.
    Min,
    /// Maximum.
    Max,
    /// Product.
    Prod,
    /// Bitwise "and".
    Band,
    /// Bitwise "or".
    Bor,
    /// Bitwise "exclusive or".
    Bxor,
}

impl RedOp {
    /// Returns the code of the reduction, without its factor.
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

    /// Returns the reduction of a code. `factor` is that of [`RedOp::PremulSum`].
    pub fn from_code(code: u8, factor: f64) -> Option<Self> {
        use RedOp::{Avg, Band, Bor, Bxor, Max, Min, PremulSum, Prod, Sum};
        let all = [Sum, Avg, PremulSum(factor), Min, Max, Prod, Band, Bor, Bxor];
        all.get(code as usize).copied()
    }

    /// Returns the name, for example "premul_sum".
    pub const fn name(self) -> &'static str {
        ["sum", "avg", "premul_sum", "min", "max", "prod", "band", "bor", "bxor"][self.code() as usize]
    }
}
