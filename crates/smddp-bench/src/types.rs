//! Element types and reductions with the names of nccl-tests.

use smddp_core::{DType, RedOp};

/// The element types in the order of `-d all`.
pub(crate) const DTYPES: [(&str, DType); 12] = [
    ("int8", DType::I8),
    ("uint8", DType::U8),
    ("int32", DType::I32),
    ("uint32", DType::U32),
    ("int64", DType::I64),
    ("uint64", DType::U64),
    ("half", DType::F16),
    ("float", DType::F32),
    ("double", DType::F64),
    ("bfloat16", DType::BF16),
    ("f8e4m3", DType::Opaque1),
    ("f8e5m2", DType::Opaque1),
];

/// The factor of `mulsum` for each rank's input.
pub(crate) const MULSUM: f64 = 2.0;

/// The reductions in the order of `-o all`.
pub(crate) const REDOPS: [(&str, RedOp); 9] = [
    ("sum", RedOp::Sum),
    ("prod", RedOp::Prod),
    ("max", RedOp::Max),
    ("min", RedOp::Min),
    ("avg", RedOp::Avg),
    ("mulsum", RedOp::PremulSum(MULSUM)),
    ("band", RedOp::Band),
    ("bor", RedOp::Bor),
    ("bxor", RedOp::Bxor),
];

pub(crate) fn parse_dtype(text: &str) -> Result<Selection<DType>, String> {
    parse(text, &DTYPES, "datatype")
}

pub(crate) fn parse_redop(text: &str) -> Result<Selection<RedOp>, String> {
    parse(text, &REDOPS, "op")
}

/// One entry of a list, or all entries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Selection<T> {
    One(&'static str, T),
    All,
}

impl<T: Copy> Selection<T> {
    pub(crate) fn of(self, all: &[(&'static str, T)]) -> Vec<(&'static str, T)> {
        match self {
            Selection::All => all.to_vec(),
            Selection::One(name, one) => vec![(name, one)],
        }
    }
}

fn parse<T: Copy>(text: &str, all: &[(&'static str, T)], kind: &str) -> Result<Selection<T>, String> {
    if text == "all" {
        return Ok(Selection::All);
    }
    all.iter().find(|(name, _)| *name == text).map(|(name, x)| Selection::One(name, *x)).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        format!("invalid {kind} '{text}': expected one of {}, all", names.join(", "))
    })
}

/// Returns true if the type supports the reduction. Opaque types support none.
pub(crate) fn has(dtype: DType, op: RedOp) -> bool {
    dtype != DType::Opaque1 && (dtype.is_integer() || !is_bitwise(op))
}

pub(crate) const fn is_bitwise(op: RedOp) -> bool {
    matches!(op, RedOp::Band | RedOp::Bor | RedOp::Bxor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_nccl_tests() {
        assert_eq!(parse_dtype("half"), Ok(Selection::One("half", DType::F16)));
        assert_eq!(parse_dtype("f8e5m2"), Ok(Selection::One("f8e5m2", DType::Opaque1)));
        assert_eq!(parse_dtype("all"), Ok(Selection::All));
        assert!(parse_dtype("float32").is_err_and(|e| e.contains("bfloat16")));
        assert_eq!(parse_redop("avg").map(|c| c.of(&REDOPS)), Ok(vec![("avg", RedOp::Avg)]));
    }
}
