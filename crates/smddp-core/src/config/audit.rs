//! Checks for corrupted data (`SMDDP_AUDIT`).

use std::fmt;
use std::num::NonZeroU64;

use smddp_plan::names::did_you_mean;

/// Default interval of compared results, in calls.
const DEFAULT_INTERVAL: u64 = 100;

/// Checks for corrupted data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Audit {
    /// Each frame between nodes has a checksum.
    pub wire: bool,
    /// Ranks compare the result of every n-th all_reduce with this n.
    pub results: Option<NonZeroU64>,
}

impl Audit {
    /// Parses the setting.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        const NAMES: [&str; 2] = ["wire", "results"];
        let mut audit = Self::default();
        for part in text.split(',').map(str::trim).filter(|_| !text.is_empty()) {
            let part = part.to_ascii_lowercase();
            let (name, interval) = match part.split_once(':') {
                Some((name, interval)) => (name, interval.trim().parse().ok()),
                None => (part.as_str(), NonZeroU64::new(DEFAULT_INTERVAL)),
            };
            match (name.trim(), interval) {
                ("wire", _) if !part.contains(':') => audit.wire = true,
                ("results", Some(interval)) => audit.results = Some(interval),
                (name, _) => {
                    let hint = if NAMES.contains(&name) { String::new() } else { did_you_mean(name, NAMES) };
                    return Err(format!(
                        "wire, results, results:N with N of 1 or more, or wire,results:N{hint}"
                    ));
                }
            }
        }
        Ok(audit)
    }

    /// Returns a description for `smddp info`.
    pub fn describe(self) -> String {
        let wire = self.wire.then(|| "CRC32C of each frame between nodes".to_owned());
        let results = self
            .results
            .map(|interval| format!("comparison of all_reduce results in host memory, interval {interval}"));
        let checks: Vec<String> = wire.into_iter().chain(results).collect();
        if checks.is_empty() { "off (SMDDP_AUDIT)".to_owned() } else { checks.join(", ") }
    }

    /// Returns a note for the log line about a new group; empty without checks.
    pub(crate) fn note(self) -> String {
        if self == Self::default() { String::new() } else { format!(", audit {self}") }
    }
}

/// Formats the setting. Equivalent values have equal texts.
impl fmt::Display for Audit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.wire, self.results) {
            (false, None) => Ok(()),
            (true, None) => f.write_str("wire"),
            (false, Some(interval)) => write!(f, "results:{interval}"),
            (true, Some(interval)) => write!(f, "wire,results:{interval}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_check_is_selected_by_name_and_an_invalid_value_is_an_error() {
        let of = |wire, results| Ok(Audit { wire, results: NonZeroU64::new(results) });
        assert_eq!(Audit::parse(""), of(false, 0));
        assert_eq!(Audit::parse("wire"), of(true, 0));
        assert_eq!(Audit::parse("results"), of(false, DEFAULT_INTERVAL));
        assert_eq!(Audit::parse("Results: 3"), of(false, 3));
        assert_eq!(Audit::parse("wire, results:50"), of(true, 50));
        for text in ["results:0", "results:", "results:-1", "wire:2", "wires", ",", "wire,,results", "0", "1"]
        {
            let error = Audit::parse(text).unwrap_err();
            assert!(error.contains("results:N"), "{text}: {error}");
        }
        assert_eq!(Audit::default().describe(), "off (SMDDP_AUDIT)");
        assert_eq!(
            (Audit::default().note().as_str(), of(true, 50).map(Audit::note)),
            ("", Ok(", audit wire,results:50".to_owned()))
        );
        assert!(Audit::parse("wires").unwrap_err().contains("did you mean wire?"));
    }
}
