//! Alternative decisions, for comparison with the chosen one by simulation.

use super::shape::Case;
use super::{Choice, Decision, GroupShape, Settings, Shape, cut, decide, starts};
use crate::algorithms::Algorithm;

/// Numbers of pieces per block to try, in addition to the default.
const PARTS: [usize; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
/// Smallest and largest piece in bytes.
const SMALLEST: usize = 4 << 10;
const LARGEST: usize = 4 << 20;

/// Returns a decision for every algorithm that supports the call. For each algorithm the default piece size
/// comes first, then other sizes whose slots fit the staging memory.
pub fn alternatives(shape: &Shape, group: &GroupShape<'_>, settings: &Settings<'_>) -> Vec<Decision> {
    let mut found = Vec::new();
    for algorithm in Algorithm::ALL {
        let first = decide(shape, group, &Settings { algorithm: Some(algorithm), ..*settings });
        if first.choice.algorithm != algorithm {
            continue;
        }
        let starts = starts(&first.blocks[0]);
        let case = Case::new(shape, &starts, group, settings);
        let room = cut::room(algorithm, &case).unwrap_or(0);
        let own = first.choice;
        let mut choices = vec![own];
        let block = first.longest();
        let pieces = PARTS.iter().map(|parts| block.div_ceil(*parts).max(1).next_multiple_of(64));
        for segment in pieces.filter(|piece| (SMALLEST..=LARGEST).contains(piece)) {
            let depth = if 4 * segment <= room { 4 } else { 2 };
            if depth * segment <= room && settings.segment.is_none() && !case.fits_inline() {
                choices.push(Choice { segment, depth, ..own });
            }
        }
        choices.dedup_by_key(|choice| choice.segment);
        found.extend(choices.into_iter().map(|choice| Decision { choice, ..first.clone() }));
    }
    found
}
