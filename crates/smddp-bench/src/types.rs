//! Element types and reductions under nccl-tests' names.

use smddp_core::{DType, RedOp};

/// In the order of `-d all`.
pub(crate) const DTYPES: [(&str, DType); 10] = [
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
];

/// In the order of `-o all`.
pub(crate) const REDOPS: [(&str, RedOp); 8] = [
    ("sum", RedOp::Sum),
    ("prod", RedOp::Prod),
    ("max", RedOp::Max),
    ("min", RedOp::Min),
    ("avg", RedOp::Avg),
    ("band", RedOp::Band),
    ("bor", RedOp::Bor),
    ("bxor", RedOp::Bxor),
];

/// `None` is `all`.
pub(crate) fn parse_dtype(text: &str) -> Result<Selection<DType>, String> {
    parse(text, &DTYPES, "datatype")
}

pub(crate) fn parse_redop(text: &str) -> Result<Selection<RedOp>, String> {
    parse(text, &REDOPS, "op")
}

/// One of a list of names, or all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Selection<T> {
    One(T),
    All,
}

impl<T: Copy + PartialEq> Selection<T> {
    pub(crate) fn of(self, all: &[(&'static str, T)]) -> Vec<(&'static str, T)> {
        match self {
            Selection::All => all.to_vec(),
            Selection::One(one) => all.iter().copied().filter(|(_, x)| *x == one).collect(),
        }
    }
}

fn parse<T: Copy>(text: &str, all: &[(&str, T)], what: &str) -> Result<Selection<T>, String> {
    if text == "all" {
        return Ok(Selection::All);
    }
    all.iter().find(|(name, _)| *name == text).map(|(_, x)| Selection::One(*x)).ok_or_else(|| {
        let names: Vec<_> = all.iter().map(|(name, _)| *name).collect();
        format!("there is no {what} '{text}'; there are {}, all", names.join(", "))
    })
}

pub(crate) const fn is_bitwise(op: RedOp) -> bool {
    matches!(op, RedOp::Band | RedOp::Bor | RedOp::Bxor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_nccl_tests() {
        assert_eq!(parse_dtype("half"), Ok(Selection::One(DType::F16)));
        assert_eq!(parse_dtype("all"), Ok(Selection::All));
        assert!(parse_dtype("float32").is_err_and(|e| e.contains("bfloat16")));
        assert_eq!(parse_redop("avg").map(|c| c.of(&REDOPS)), Ok(vec![("avg", RedOp::Avg)]));
    }
}
