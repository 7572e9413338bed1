//! Suggestions for misspelt names.

/// Returns the most similar of `names`, if it differs from `name` in at most two letters, or a quarter of them.
pub fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let most = 2.max(name.len() / 4);
    let distances = names.into_iter().map(|known| (distance(known, name), known));
    distances
        .min_by_key(|(distance, _)| *distance)
        .filter(|(distance, _)| *distance <= most)
        .map(|(_, known)| known)
}

/// Returns "; did you mean NAME?", or an empty string without a similar name.
pub fn did_you_mean<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    nearest(name, names).map_or_else(String::new, |similar| format!("; did you mean {similar}?"))
}

/// Returns the Levenshtein distance of two names, ignoring case.
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
    fn only_similar_names_are_suggested() {
        let names = ["SMDDP_TUNE", "SMDDP_WIRE_FORMAT", "SMDDP_STAGING_BYTES", "ring"];
        for (name, similar) in [
            ("SMDDP_STAGING_BYTE", Some("SMDDP_STAGING_BYTES")),
            ("SMDDP_WIREFORMAT", Some("SMDDP_WIRE_FORMAT")),
            ("smddp_tune", Some("SMDDP_TUNE")),
            ("rign", Some("ring")),
            ("SMDDP_TIMEOUT", None),
            ("SMDDP_FOO_BAR_BAZ", None),
            ("zz", None),
            ("", None),
        ] {
            assert_eq!(nearest(name, names), similar, "{name}");
        }
        assert_eq!(nearest("ring", []), None);
    }
}
