//! A group that need not exist says what one that does says.

#![allow(clippy::unwrap_used)] // A test stops at the first surprise.

#[expect(dead_code, reason = "each test file uses a part of it")]
mod common;

use std::time::Duration;

use common::means;

use smddp_core::preview::{Absent, Imagined};
use smddp_core::{Collective, Communicator, Config, DType, Network};
use smddp_plan::Topology;
use smddp_transport::joint::Prepared;

#[test]
fn a_group_tells_what_is_told_of_one_that_need_not_exist() {
    let config = Config::get().unwrap();
    for labels in [vec![0; 3], vec![0, 0, 1, 1], vec![0, 1, 1, 1, 2], vec![0, 1, 0, 1]] {
        let node = |rank: usize| means(Some(format!("node {}", labels[rank])));
        let prepared: Vec<_> = (0..labels.len())
            .map(|rank| Prepared::new(rank, labels.len(), Vec::new(), &node(rank)).unwrap())
            .collect();
        let cards = prepared.iter().map(|prepared| prepared.card().clone()).collect();
        let link = prepared.into_iter().next().unwrap().connect(cards).unwrap().group;
        let group = Communicator::over(link, &labels, "told", Duration::from_secs(60));
        let absent = Absent::new(Topology::from_labels(&labels), Network::ASSUMED, config);
        for collective in Collective::ALL {
            for bytes in [0, 4, 64, 1 << 10, 100_000, 16 << 20] {
                for dtype in [DType::F32, DType::BF16] {
                    let call = Imagined::new(collective, dtype, bytes, labels.len());
                    let told = absent.path(&group.way(), &call);
                    assert_eq!(
                        group.path(collective, dtype, bytes),
                        told,
                        "{labels:?} {collective:?} {bytes}"
                    );
                }
            }
        }
    }
}
