//! Fuzz target support: evaluation of rank information.

use super::join::nodes;
use super::transports::check_addresses;
use crate::RankInfo;

pub(crate) fn evaluate(rank_infos: &[RankInfo]) {
    assert_eq!(nodes(rank_infos).len(), rank_infos.len());
    let _ = check_addresses(rank_infos);
    rank_infos.iter().for_each(|rank_info| drop(rank_info.name()));
}
