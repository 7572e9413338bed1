//! Digests of results, and the evaluation of a comparison (`SMDDP_AUDIT=results`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use smddp_plan::Collective;

use crate::bind::BoundCall;
use crate::call::fingerprint::mix;
use crate::call::numbered;
use crate::error::{Error, Result};
use crate::failure::error_text;
use crate::failure::names::GroupNames;

/// Part of an operation in the comparison of results.
pub(crate) enum Audit {
    /// The result is compared if the call is due.
    Compared(Arc<AuditPlan>),
    /// The operation gathers the digests of the call before it.
    Comparison(Comparison),
}

/// Facts of a group for the comparison of results.
pub(crate) struct AuditPlan {
    /// Interval of compared results, in calls.
    pub(super) interval: u64,
    /// Binding of the gather.
    pub(super) bound: Arc<BoundCall>,
    /// Parts of the system that may have changed a result.
    pub(super) suspects: &'static str,
}

/// Gather of the digests of one result.
pub(crate) struct Comparison {
    pub(super) collective: Collective,
    pub(super) seq: u64,
    pub(super) suspects: &'static str,
    /// Digest of this rank, and then the digests of all ranks.
    pub(super) words: Arc<[AtomicU64]>,
}

impl Comparison {
    /// Returns the error if digests differ.
    pub(super) fn outcome(&self, group: &GroupNames) -> Result<()> {
        let digests: Vec<u64> = self.words[1..].iter().map(|word| word.load(Ordering::Relaxed)).collect();
        let ranks = differing(&digests);
        if ranks.is_empty() {
            return Ok(());
        }
        let named = |&rank: &usize| format!("{} has {:#018x}", group.describe(rank), digests[rank]);
        let shown: Vec<String> = ranks.iter().take(MAX_SHOWN).map(named).collect();
        let more = ranks.len().saturating_sub(MAX_SHOWN);
        let more = if more > 0 { format!(", and {more} more ranks differ") } else { String::new() };
        let usual = (0..digests.len()).find(|rank| !ranks.contains(rank));
        let usual = usual.map_or_else(String::new, |rank| {
            format!(", the other {} ranks have {:#018x}", digests.len() - ranks.len(), digests[rank])
        });
        let detail = format!(
            "its result must have equal bits on all ranks, but digests differ: {}{more}{usual}; {} changed data since the last \
             comparison; {}",
            shown.join(", "),
            self.suspects,
            error_text::CHECK_HARDWARE,
        );
        Err(Error::Corrupted {
            operation: numbered(self.collective, self.seq),
            group: group.group(),
            ranks,
            detail,
        })
    }
}

/// Maximum number of ranks whose digests an error shows.
const MAX_SHOWN: usize = 4;

/// Returns the ranks whose digests differ from the majority; all ranks if no digest has a majority.
fn differing(digests: &[u64]) -> Vec<usize> {
    let with = |digest: u64| digests.iter().filter(|&&other| other == digest).count();
    let majority = digests.iter().copied().find(|&digest| 2 * with(digest) > digests.len());
    (0..digests.len()).filter(|&rank| Some(digests[rank]) != majority).collect()
}

/// Returns the digest of a result. Each lane is a chain of bijections, so a change of one word always changes it.
#[inline(never)]
pub(super) fn digest(bytes: &[u8]) -> u64 {
    const LANES: usize = 8;
    const WORD: usize = size_of::<u64>();
    const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
    let step = |lane: u64, word: u64| (lane ^ word).wrapping_mul(FACTOR).rotate_left(29);
    let mut lanes: [u64; LANES] = std::array::from_fn(|lane| mix(lane as u64));
    let mut rows = bytes.chunks_exact(LANES * WORD);
    for row in &mut rows {
        for (index, lane) in lanes.iter_mut().enumerate() {
            let word = row[WORD * index..].first_chunk::<WORD>();
            *lane = step(*lane, word.map_or(0, |word| u64::from_le_bytes(*word)));
        }
    }
    let mut result = mix(bytes.len() as u64);
    for chunk in rows.remainder().chunks(WORD) {
        let mut word = [0; WORD];
        word[..chunk.len()].copy_from_slice(chunk);
        result = mix(step(result, u64::from_le_bytes(word)));
    }
    lanes.into_iter().fold(result, |result, lane| mix(step(result, lane)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_changes_with_each_of_10_000_flipped_bits_and_with_the_length() {
        let mut bytes: Vec<u8> = (0..1250 + 7).map(|i: u32| (i * i) as u8).collect();
        let before = digest(&bytes);
        for bit in 0..10_000 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(digest(&bytes), before, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        let zeros: Vec<u64> = (0..200).map(|length| digest(&vec![0; length])).collect();
        assert_eq!(zeros.iter().collect::<std::collections::HashSet<_>>().len(), zeros.len());
    }

    #[test]
    fn ranks_outside_the_majority_differ() {
        assert_eq!(differing(&[5, 5, 5]), [0; 0]);
        assert_eq!(differing(&[5, 5, 6]), [2]);
        assert_eq!(differing(&[5, 6]), [0, 1]);
        assert_eq!(differing(&[5, 6, 5, 6]), [0, 1, 2, 3]);
        assert_eq!(differing(&[7, 5, 5, 6, 5]), [0, 3]);
    }
}
