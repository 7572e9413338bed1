//! A group that need not exist says what one that does says.

#![allow(clippy::unwrap_used)] // A test stops at the first surprise.

use std::time::Duration;

use smddp_core::preview::{Absent, Imagined};
use smddp_core::{Collective, Communicator, Config, DType, Network};
use smddp_plan::Topology;
use smddp_transport::loopback::{self, Script};

#[test]
fn a_group_tells_what_is_told_of_one_that_need_not_exist() {
    let config = Config::get().unwrap();
    for labels in [vec![0; 3], vec![0, 0, 1, 1], vec![0, 1, 1, 1, 2], vec![0, 1, 0, 1]] {
        let links = loopback::group(labels.len(), Script::default());
        let link = Box::new(links.into_iter().next().unwrap());
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
