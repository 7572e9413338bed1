//! `NCCL_TESTS_SPLIT`, `NCCL_TESTS_SPLIT_MASK`: split of the ranks into groups that run the same calls concurrently.

use crate::error::{Error, Result};

/// The environment variables. The mask has precedence.
pub(crate) const VARIABLES: [&str; 2] = ["NCCL_TESTS_SPLIT_MASK", "NCCL_TESTS_SPLIT"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    And,
    Or,
    Mod,
    Div,
}

const WORDS: [(&str, Operation); 8] = [
    ("AND", Operation::And),
    ("OR", Operation::Or),
    ("MOD", Operation::Mod),
    ("DIV", Operation::Div),
    ("&", Operation::And),
    ("|", Operation::Or),
    ("%", Operation::Mod),
    ("/", Operation::Div),
];

/// The color of a rank. The ranks of one color are a group, in rank order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Split {
    operation: Operation,
    value: u32,
}

impl Split {
    /// Reads the environment through `get`. Returns `None` if both variables are unset or blank.
    pub(crate) fn from_env(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Split>> {
        for (name, read) in VARIABLES.into_iter().zip([mask, split]) {
            if let Some(text) = get(name).filter(|text| !text.trim().is_empty()) {
                let wrong = |reason| Error::Usage(format!("{name} is '{text}': {reason}"));
                return read(text.trim()).map(Some).map_err(wrong);
            }
        }
        Ok(None)
    }

    pub(crate) fn color(self, rank: usize) -> i64 {
        let (rank, value) = (rank as i64, i64::from(self.value));
        match self.operation {
            Operation::And => rank & value,
            Operation::Or => rank | value,
            Operation::Mod => rank % value,
            Operation::Div => rank / value,
        }
    }

    /// Returns the sizes of the groups of `ranks` ranks.
    pub(crate) fn sizes(self, ranks: usize) -> Vec<usize> {
        let mut groups = std::collections::BTreeMap::<i64, usize>::new();
        for rank in 0..ranks {
            *groups.entry(self.color(rank)).or_default() += 1;
        }
        groups.into_values().collect()
    }
}

/// Parses the mask, which is hexadecimal with or without 0x, as in nccl-tests.
fn mask(text: &str) -> std::result::Result<Split, String> {
    let value = digits(prefixed(text, "0x").unwrap_or(text), 16);
    let value = value.ok_or("expected a hexadecimal number of at most 32 bits, such as 0x7")?;
    Ok(Split { operation: Operation::And, value })
}

fn split(text: &str) -> std::result::Result<Split, String> {
    let invalid =
        || "expected AND, OR, MOD or DIV (or & | % /) and a number, such as 'AND 0x7' or '% 8'".to_owned();
    let (operation, value) = WORDS
        .iter()
        .find_map(|(word, operation)| prefixed(text, word).map(|value| (*operation, value)))
        .ok_or_else(invalid)?;
    let value = number(value.trim_start()).ok_or_else(invalid)?;
    if value == 0 && matches!(operation, Operation::Mod | Operation::Div) {
        return Err("the divisor is 0: expected 1 or more".into());
    }
    Ok(Split { operation, value })
}

/// Returns the text after `prefix`, which is compared without case.
fn prefixed<'a>(text: &'a str, prefix: &str) -> Option<&'a str> {
    let (head, rest) = text.split_at_checked(prefix.len())?;
    head.eq_ignore_ascii_case(prefix).then_some(rest)
}

/// Parses a number as nccl-tests does: 0x hexadecimal, 0b binary, a leading 0 octal.
fn number(text: &str) -> Option<u32> {
    let (text, radix) = match (prefixed(text, "0x"), prefixed(text, "0b"), prefixed(text, "0")) {
        (Some(rest), ..) => (rest, 16),
        (_, Some(rest), _) => (rest, 2),
        (.., Some(rest)) if !rest.is_empty() => (rest, 8),
        _ => (text, 10),
    };
    digits(text, radix)
}

/// Parses digits without a sign.
fn digits(text: &str, radix: u32) -> Option<u32> {
    text.chars().all(|c| c.is_digit(radix)).then(|| u32::from_str_radix(text, radix).ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(mask: &str, split: &str) -> std::result::Result<Option<Split>, String> {
        let get = |name: &str| Some(if name == VARIABLES[0] { mask } else { split }.to_owned());
        Split::from_env(&get).map_err(|e| e.to_string())
    }

    fn colors(mask: &str, split: &str) -> Vec<i64> {
        let split = read(mask, split).unwrap().unwrap();
        (0..8).map(|rank| split.color(rank)).collect()
    }

    #[test]
    fn color_is_the_operation_on_rank_and_value() {
        for text in ["AND 0x3", "and3", "&0x3", "& 0b11", "& 3", " &\t03 ", "MOD 4", "%4", "mod 0x4"] {
            assert_eq!(colors("", text), [0, 1, 2, 3, 0, 1, 2, 3], "{text}");
        }
        for text in ["DIV 4", "/4", "/ 0b100", "div 04"] {
            assert_eq!(colors("", text), [0, 0, 0, 0, 1, 1, 1, 1], "{text}");
        }
        for text in ["OR 6", "|6", "| 0x6", "or 06"] {
            assert_eq!(colors("", text), [6, 7, 6, 7, 6, 7, 6, 7], "{text}");
        }
        assert_eq!(colors("", "& 010"), [0; 8]);
        assert_eq!(read("", " "), Ok(None));
    }

    #[test]
    fn mask_is_hexadecimal_and_has_precedence() {
        assert_eq!(colors("0x3", "DIV 4"), [0, 1, 2, 3, 0, 1, 2, 3]);
        assert_eq!(colors("4", ""), [0, 0, 0, 0, 4, 4, 4, 4]);
        assert_eq!(read("10", ""), Ok(Some(Split { operation: Operation::And, value: 16 })));
    }

    #[test]
    fn sizes_of_all_groups_are_returned() {
        let sizes = |text: &str, ranks| read("", text).unwrap().unwrap().sizes(ranks);
        assert_eq!(sizes("MOD 3", 8), [3, 3, 2]);
        assert_eq!(sizes("DIV 4", 8), [4, 4]);
        assert_eq!(sizes("AND 0", 5), [5]);
    }

    #[test]
    fn invalid_values_are_rejected_with_the_variable_and_the_choices() {
        for text in
            ["XOR 3", "MOD", "AND x", "3", "% -4", "& +1", "AND 0x", "DIV 2 3", "& 4294967296", "/ 08"]
        {
            let error = read("", text).unwrap_err();
            assert!(error.contains("NCCL_TESTS_SPLIT is") && error.contains("'AND 0x7'"), "{text}: {error}");
        }
        for text in ["MOD 0", "/0x0"] {
            assert!(read("", text).unwrap_err().contains("the divisor is 0"), "{text}");
        }
        assert!(read("seven", "").unwrap_err().contains("NCCL_TESTS_SPLIT_MASK is 'seven'"));
    }
}
