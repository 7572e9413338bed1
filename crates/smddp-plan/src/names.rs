//! Suggestions for misspelt names.

/// The one of `names` that is so near to `name` that it may be meant.
pub fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = 2.max(name.len() / 4);
    let distances = names.into_iter().map(|known| (distance(known, name), known));
    distances
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, _)| *distance <= most)
        .map(|(_, known)| known)
}

/// "; did you mean NAME?", or nothing where no name is near.
pub fn did_you_mean<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    nearest(name, names).map_or_else(String::new, |near| format!("; did you mean {near}?"))
}

/// Levenshtein distance of two names, without regard to case.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.bytes().enumerate() {
            let next =
                (diagonal + usize::from(!x.eq_ignore_ascii_case(&y))).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], next);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_near_names_are_suggested() {
        let names = ["SMDDP_TUNE", "SMDDP_WIRE_FORMAT", "SMDDP_STAGING_BYTES", "ring"];
        for (name, near) in [
            ("SMDDP_STAGING_BYTE", Some("SMDDP_STAGING_BYTES")),
            ("SMDDP_WIREFORMAT", Some("SMDDP_WIRE_FORMAT")),
            ("smddp_tune", Some("SMDDP_TUNE")),
            ("rign", Some("ring")),
            ("SMDDP_TIMEOUT", None),
            ("SMDDP_FOO_BAR_BAZ", None),
            ("zz", None),
            ("", None),
        ] {
            assert_eq!(nearest(name, names), near, "{name}");
        }
        assert_eq!(nearest("ring", []), None);
    }
}
