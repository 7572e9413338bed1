//! NCCL's way of naming interfaces, and gloo's.

/// `eth,ens`: names that begin so; `=eth0,eth1`: these names; `^docker,lo` and `^=docker0`: all but those. gloo's
/// lists are names in full.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pattern {
    exclude: bool,
    exact: bool,
    words: Vec<String>,
}

impl Pattern {
    /// `exact`: words without `=` are names in full, too. The error says what is wrong with `value`.
    pub(super) fn parse(value: &str, exact: bool) -> Result<Self, &'static str> {
        let rest = value.trim();
        let (exclude, rest) = rest.strip_prefix('^').map_or((false, rest), |r| (true, r));
        let (marked, rest) = rest.strip_prefix('=').map_or((false, rest), |r| (true, r));
        // The mark stands once, at the head; people repeat it all the same, and can mean nothing else.
        let head: &[char] = if exclude { &['^', '='] } else { &['='] };
        let words: Vec<String> = rest
            .split(',')
            .map(|word| word.trim().trim_start_matches(head))
            .filter(|word| !word.is_empty())
            .map(str::to_owned)
            .collect();
        if words.is_empty() {
            return Err("it names none");
        }
        if words.iter().any(|word| word.contains(['^', '='])) {
            return Err("^ and = stand at its beginning only");
        }
        // "^lo,docker" is NCCL's, wherever it is found: docker0 is meant.
        Ok(Self { exclude, exact: marked || (exact && !exclude), words })
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        let met = |word: &String| if self.exact { name == word } else { name.starts_with(word.as_str()) };
        self.words.iter().any(met) != self.exclude
    }

    /// Says which to take, not which to leave.
    pub(super) const fn is_include_list(&self) -> bool {
        !self.exclude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(value: &str, exact: bool) -> Vec<&'static str> {
        let pattern = Pattern::parse(value, exact).unwrap();
        ["lo", "eth0", "eth1", "eth10", "ens5", "docker0"]
            .into_iter()
            .filter(|n| pattern.matches(n))
            .collect()
    }

    #[test]
    fn a_word_is_the_beginning_of_a_name() {
        assert_eq!(taken("eth1,ens", false), ["eth1", "eth10", "ens5"]);
        assert_eq!(taken(" eth1 , ens ", false), ["eth1", "eth10", "ens5"]);
    }

    #[test]
    fn an_equals_sign_asks_for_the_name_in_full() {
        assert_eq!(taken("=eth1,ens5", false), ["eth1", "ens5"]);
        assert_eq!(taken("=eth1,=ens5", false), ["eth1", "ens5"]);
    }

    #[test]
    fn a_caret_leaves_names_out() {
        assert_eq!(taken("^docker,lo", false), ["eth0", "eth1", "eth10", "ens5"]);
        assert_eq!(taken("^=eth1,lo", false), ["eth0", "eth10", "ens5", "docker0"]);
        assert_eq!(taken("^docker,^lo", false), ["eth0", "eth1", "eth10", "ens5"]);
    }

    #[test]
    fn gloos_list_holds_names_in_full_and_may_leave_out_as_nccls_does() {
        assert_eq!(taken("eth1,ens5", true), ["eth1", "ens5"]);
        assert_eq!(taken("^lo,docker", true), ["eth0", "eth1", "eth10", "ens5"]);
    }

    #[test]
    fn a_value_that_is_no_list_is_refused() {
        for value in ["^", "=", "^=", ",", "eth0,^lo", "eth=0"] {
            assert!(Pattern::parse(value, false).is_err(), "{value}");
        }
    }
}
