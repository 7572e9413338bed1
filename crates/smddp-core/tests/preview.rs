//! The preview of a group that does not exist agrees with a real group.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[expect(dead_code, reason = "each test file uses a part of it")]
mod common;

use std::time::Duration;

use common::means;

use smddp_core::preview::{HypotheticalCall, HypotheticalGroup};
use smddp_core::{Collective, Communicator, Config, DType, Network};
use smddp_group::joint::Prepared;
use smddp_plan::Topology;

#[test]
fn preview_agrees_with_a_real_group() {
    let config = Config::get().unwrap();
    for labels in [vec![0; 3], vec![0, 0, 1, 1], vec![0, 1, 1, 1, 2], vec![0, 1, 0, 1]] {
        let node = |rank: usize| means(Some(format!("node {}", labels[rank])));
        let prepared: Vec<_> = (0..labels.len())
            .map(|rank| Prepared::new(rank, labels.len(), Vec::new(), &node(rank)).unwrap())
            .collect();
        let infos = prepared.iter().map(|prepared| prepared.rank_info().clone()).collect();
        let link = prepared.into_iter().next().unwrap().connect(infos).unwrap().group;
        let group = Communicator::from_group(link, &labels, "preview", Duration::from_secs(60));
        let absent = HypotheticalGroup::new(Topology::from_labels(&labels), Network::ASSUMED, config);
        for collective in Collective::ALL {
            for bytes in [0, 4, 64, 1 << 10, 100_000, 16 << 20] {
                for dtype in [DType::F32, DType::BF16] {
                    let call = HypotheticalCall::new(collective, dtype, bytes, labels.len());
                    let previewed = absent.path(&group.transport(), &call);
                    assert_eq!(
                        group.path(collective, dtype, bytes),
                        previewed,
                        "{labels:?} {collective:?} {bytes}"
                    );
                }
            }
        }
    }
}
