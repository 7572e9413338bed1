//! Interface patterns in NCCL's and gloo's syntax.

/// List of interface names or name prefixes.
///
/// `eth,ens` matches names with these prefixes and `=eth0,eth1` these exact names. `^docker,lo` and `^=docker0` match
/// all other names. gloo's lists have exact names.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Pattern {
    exclude: bool,
    exact: bool,
    entries: Vec<String>,
}

impl Pattern {
    /// Parses a list. `exact`: entries without `=` are exact names, too. The error is the problem with `value`.
    pub(super) fn parse(value: &str, exact: bool) -> Result<Self, &'static str> {
        let rest = value.trim();
        let (exclude, rest) = rest.strip_prefix('^').map_or((false, rest), |r| (true, r));
        let (marked, rest) = rest.strip_prefix('=').map_or((false, rest), |r| (true, r));
        // The markers belong at the start of the list. Accept repeated markers, which are unambiguous.
        let markers: &[char] = if exclude { &['^', '='] } else { &['='] };
        let entries: Vec<String> = rest
            .split(',')
            .map(|entry| entry.trim().trim_start_matches(markers))
            .filter(|entry| !entry.is_empty())
            .map(str::to_owned)
            .collect();
        if entries.is_empty() {
            return Err("it has no interface name");
        }
        if entries.iter().any(|entry| entry.contains(['^', '='])) {
            return Err("'^' and '=' are allowed at its start only");
        }
        // "^lo,docker" is NCCL's syntax in any setting, so "docker" is a prefix that excludes docker0.
        Ok(Self { exclude, exact: marked || (exact && !exclude), entries })
    }

    pub(super) fn matches(&self, name: &str) -> bool {
        let listed =
            |entry: &String| if self.exact { name == entry } else { name.starts_with(entry.as_str()) };
        self.entries.iter().any(listed) != self.exclude
    }

    /// Returns true if the list has the interfaces to use, not the ones to exclude.
    pub(super) const fn is_include_list(&self) -> bool {
        !self.exclude
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matching(value: &str, exact: bool) -> Vec<&'static str> {
        let pattern = Pattern::parse(value, exact).unwrap();
        ["lo", "eth0", "eth1", "eth10", "ens5", "docker0"]
            .into_iter()
            .filter(|n| pattern.matches(n))
            .collect()
    }

    #[test]
    fn entry_is_a_prefix() {
        assert_eq!(matching("eth1,ens", false), ["eth1", "eth10", "ens5"]);
        assert_eq!(matching(" eth1 , ens ", false), ["eth1", "eth10", "ens5"]);
    }

    #[test]
    fn equals_sign_selects_exact_names() {
        assert_eq!(matching("=eth1,ens5", false), ["eth1", "ens5"]);
        assert_eq!(matching("=eth1,=ens5", false), ["eth1", "ens5"]);
    }

    #[test]
    fn caret_excludes_names() {
        assert_eq!(matching("^docker,lo", false), ["eth0", "eth1", "eth10", "ens5"]);
        assert_eq!(matching("^=eth1,lo", false), ["eth0", "eth10", "ens5", "docker0"]);
        assert_eq!(matching("^docker,^lo", false), ["eth0", "eth1", "eth10", "ens5"]);
    }

    #[test]
    fn gloo_list_has_exact_names_and_accepts_nccl_exclusions() {
        assert_eq!(matching("eth1,ens5", true), ["eth1", "ens5"]);
        assert_eq!(matching("^lo,docker", true), ["eth0", "eth1", "eth10", "ens5"]);
    }

    #[test]
    fn malformed_list_is_rejected() {
        for value in ["^", "=", "^=", ",", "eth0,^lo", "eth=0"] {
            assert!(Pattern::parse(value, false).is_err(), "{value}");
        }
    }
}
