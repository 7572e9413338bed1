//! What may be under way between nodes follows from the network; what arrives does not.

use smddp_core::network::{Known, Origin};
use smddp_core::{Collective, DType, Network};
use smddp_transport::fabric::srd::SrdScript;

use crate::common::{PATIENCE, Wire, over, simulated_links, try_one};

/// One way, in nanoseconds: at 1 Gbit/s and in pieces of 32 KiB windows of 16 cells and more, up to all messages.
const WAYS: [f64; 4] = [15e3, 700e3, 1.1e6, 1e8];

fn known(latency_ns: f64) -> Known {
    let network = Network { latency_ns, bytes_per_ns: 0.125, ..Network::ASSUMED };
    Known { network, origin: Origin::Set }
}

const MOVES: [Collective; 4] =
    [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce, Collective::Broadcast];

#[test]
fn a_window_of_any_number_of_cells_brings_everything() {
    for latency_ns in WAYS {
        over(Wire::Nodes(1).links(3), PATIENCE, |comm| {
            assert!(comm.set_network(known(latency_ns)));
            for collective in MOVES {
                for count in [5_000, 400_001] {
                    try_one(comm, collective, count, 1, false).unwrap();
                }
            }
        });
    }
}

/// Where the wire keeps no copy a writer has as many cells as its readers.
#[test]
fn so_does_one_over_a_wire_that_keeps_no_copies() {
    for latency_ns in [450e3, 2.5e6] {
        let (srd, links) = simulated_links(3, 1, SrdScript { seed: 5, ..SrdScript::default() });
        over(links, PATIENCE, |comm| {
            assert!(comm.set_network(known(latency_ns)));
            MOVES.iter().for_each(|&collective| try_one(comm, collective, 200_000, 1, false).unwrap());
        });
        assert_eq!(srd.violations(), []);
    }
}

#[test]
fn a_longer_way_has_more_cells() {
    let cells = |latency_ns| {
        let paths = over(Wire::Nodes(1).links(2), PATIENCE, |comm| {
            assert!(comm.set_network(known(latency_ns)));
            comm.path(Collective::AllReduce, DType::F32, 64 << 20)
        });
        assert_eq!(paths[0], paths[1]);
        paths[0].clone()
    };
    assert!(cells(15e3).ends_with(" 16 cells"), "{}", cells(15e3));
    assert!(cells(5e6).ends_with(" 153 cells"), "{}", cells(5e6));
}
