//! Parsing of sizes, and the sizes of a sweep.

/// Parses `64`, `8K`, `1.5m`, `2G` to bytes. Units are powers of 1024, as in nccl-tests.
pub(crate) fn parse_size(text: &str) -> Result<usize, String> {
    let wrong = || format!("invalid size '{text}': expected a size such as 8, 64K, 1M or 2G");
    let (digits, unit) = match text.trim().to_ascii_lowercase() {
        t if t.ends_with('k') => (t[..t.len() - 1].to_owned(), 1u64 << 10),
        t if t.ends_with('m') => (t[..t.len() - 1].to_owned(), 1 << 20),
        t if t.ends_with('g') => (t[..t.len() - 1].to_owned(), 1 << 30),
        t => (t, 1),
    };
    if let Ok(whole) = digits.trim().parse::<u64>() {
        let bytes = whole.checked_mul(unit).ok_or_else(wrong)?;
        return usize::try_from(bytes).map_err(|_| wrong());
    }
    match digits.trim().parse::<f64>() {
        Ok(value) if value.is_finite() && value >= 0.0 && value * (unit as f64) < 9e18 => {
            Ok((value * unit as f64) as usize)
        }
        _ => Err(wrong()),
    }
}

/// The sizes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Steps {
    pub min: usize,
    pub max: usize,
    /// Factor between two sizes; with 0 or 1 the difference is `bytes`.
    pub factor: usize,
    pub bytes: usize,
}

/// Returns the sizes of a sweep in bytes. Sizes grow by `factor` if it is above 1, else by `step`. The last size is always
/// `max`. In a sweep by factor, size 0 is followed by `first` (one element).
pub(crate) fn sweep(Steps { min, max, factor, bytes: step }: Steps, first: usize) -> Vec<usize> {
    let mut sizes = Vec::new();
    let mut size = min;
    while size <= max {
        sizes.push(size);
        let next = match factor {
            0 | 1 => size.checked_add(step.max(1)),
            _ if size == 0 => Some(first.max(1)),
            _ => size.checked_mul(factor),
        };
        match next {
            Some(next) => size = next,
            None => break,
        }
    }
    if sizes.last().is_some_and(|last| *last < max) {
        sizes.push(max);
    }
    sizes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        for (text, want) in [
            ("0", 0),
            ("8", 8),
            ("64K", 65536),
            ("1m", 1 << 20),
            ("2G", 2 << 30),
            ("1.5K", 1536),
            (" 3 M", 3 << 20),
        ] {
            assert_eq!(parse_size(text), Ok(want), "{text}");
        }
        for text in ["", "K", "-1", "8T", "1e", "nan", "99999999999G"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sweep_multiplies_or_adds() {
        let sweep = |min, max, factor, bytes, first| sweep(Steps { min, max, factor, bytes }, first);
        assert_eq!(sweep(8, 512, 8, 1, 4), [8, 64, 512]);
        assert_eq!(sweep(8, 600, 8, 1, 4), [8, 64, 512, 600]);
        assert_eq!(sweep(8, 40, 1, 16, 4), [8, 24, 40]);
        assert_eq!(sweep(0, 16, 2, 1, 4), [0, 4, 8, 16]);
        assert_eq!(sweep(32, 32, 1, 1 << 20, 4), [32]);
        assert_eq!(sweep(usize::MAX - 1, usize::MAX, 2, 1, 4), [usize::MAX - 1, usize::MAX]);
    }
}
