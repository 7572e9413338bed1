//! Fuzzing of rank infos from a store.

use crate::RankInfo;
use crate::joint::fuzzing::evaluate;

/// Parses the rank infos of a group: each has its length in front.
pub fn rank_info(bytes: &[u8]) {
    let mut rank_infos = Vec::new();
    let mut rest = bytes;
    while let Some((length, behind)) = rest.split_first_chunk::<2>() {
        let (rank_info, behind) = behind.split_at(behind.len().min(u16::from_le_bytes(*length).into()));
        rest = behind;
        if let Ok(rank_info) = RankInfo::from_bytes(rank_info) {
            let again = RankInfo::from_bytes(&rank_info.to_bytes()).map(|rank_info| rank_info.to_bytes());
            assert!(again.is_ok_and(|again| again == rank_info.to_bytes()));
            rank_infos.push(rank_info);
        }
    }
    evaluate(&rank_infos);
}
