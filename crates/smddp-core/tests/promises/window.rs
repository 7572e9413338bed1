//! The number of slots in flight between nodes depends on the network; the results do not.

use fake_libfabric::SimulatedFabric;
use smddp_core::network::{NetworkEstimate, Origin};
use smddp_core::{Collective, DType, Network};

use crate::common::{TIMEOUT, Wire, efa_links, over, try_one};

/// Latencies in nanoseconds. At 1 Gbit/s and with slots of 32 KiB they need windows from 16 slots up to whole
/// messages.
const LATENCIES: [f64; 4] = [15e3, 700e3, 1.1e6, 1e8];

fn known(latency_ns: f64) -> NetworkEstimate {
    let network = Network { latency_ns, bytes_per_ns: 0.125, ..Network::ASSUMED };
    NetworkEstimate { network, origin: Origin::Configured }
}

const COLLECTIVES: [Collective; 4] =
    [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce, Collective::Broadcast];

#[test]
fn collectives_are_correct_with_every_window_size() {
    for latency_ns in LATENCIES {
        over(Wire::Nodes(1).links(3), TIMEOUT, |comm| {
            assert!(comm.set_network(known(latency_ns)));
            for collective in COLLECTIVES {
                for count in [5_000, 400_001] {
                    try_one(comm, collective, count, 1, false).unwrap();
                }
            }
        });
    }
}

/// Over a wire without copies of sent data, a sender has as many slots as its readers.
#[test]
fn collectives_are_correct_with_every_window_size_without_copies() {
    for latency_ns in [450e3, 2.5e6] {
        let fabric = SimulatedFabric::with_small_limits(5, &[]);
        over(efa_links(3, 1, &fabric), TIMEOUT, |comm| {
            assert!(comm.set_network(known(latency_ns)));
            COLLECTIVES.iter().for_each(|&collective| try_one(comm, collective, 200_000, 1, false).unwrap());
        });
        assert_eq!(fabric.violations(), []);
    }
}

#[test]
fn longer_latency_needs_more_slots() {
    let slots = |latency_ns| {
        let paths = over(Wire::Nodes(1).links(2), TIMEOUT, |comm| {
            assert!(comm.set_network(known(latency_ns)));
            comm.path(Collective::AllReduce, DType::F32, 64 << 20)
        });
        assert_eq!(paths[0], paths[1]);
        paths[0].clone()
    };
    assert!(slots(15e3).ends_with(" 16 slots"), "{}", slots(15e3));
    assert!(slots(5e6).ends_with(" 153 slots"), "{}", slots(5e6));
}
