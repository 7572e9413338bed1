//! Choices for groups on several nodes.

use super::*;

fn chosen(collective: Collective, topology: &Topology, bytes: usize) -> Choice {
    choose_in(&shape(collective, topology.size(), bytes), topology)
}

#[test]
fn large_calls_use_the_mesh_with_paced_senders() {
    use Collective::*;
    for (nodes, each) in [(2, 1), (2, 8), (4, 2), (8, 8), (32, 8)] {
        let topology = Topology::blocks(nodes, each);
        for collective in [AllGather, ReduceScatter, AllReduce] {
            let shape = shape(collective, topology.size(), 256 * MIB);
            let choice = choose_in(&Shape { network: Network::PACED, ..shape }, &topology);
            assert_eq!(choice.algorithm, Algorithm::HierMesh, "{collective:?} {nodes} x {each}");
            assert!((16 * KIB..=MIB).contains(&choice.segment), "{choice:?}");
        }
    }
}

#[test]
fn large_calls_use_the_ring_where_senders_would_queue() {
    use Collective::*;
    for (collective, bytes) in [
        (AllGather, MIB),
        (ReduceScatter, MIB),
        (AllGather, 16 * MIB),
        (ReduceScatter, 16 * MIB),
        (AllReduce, 16 * MIB),
    ] {
        let four = chosen(collective, &Topology::blocks(4, 2), bytes);
        assert_eq!(four.algorithm, Algorithm::HierRing, "{collective:?} {bytes}");
        let two = chosen(collective, &Topology::blocks(2, 2), bytes);
        assert_eq!(two.algorithm, Algorithm::HierMesh, "{collective:?} {bytes}");
    }
}

#[test]
fn slow_links_get_smaller_pieces() {
    let segment = |bytes_per_ns| {
        let network = Network { bytes_per_ns, ..Network::ASSUMED };
        let shape = Shape { network, ..shape(Collective::AllReduce, 8, 16 * MIB) };
        choose_in(&shape, &Topology::blocks(4, 2)).segment
    };
    assert_eq!([12.0, 1.2, 0.124, 0.012].map(segment), [512, 256, 32, 32].map(|k| k * KIB));
}

#[test]
fn small_calls_use_few_hops() {
    let topology = Topology::blocks(4, 2);
    for bytes in [8, KIB] {
        assert_eq!(chosen(Collective::AllReduce, &topology, bytes).algorithm, Algorithm::HierPublish);
        assert_eq!(chosen(Collective::Broadcast, &topology, bytes).algorithm, Algorithm::HierPublish);
        assert_eq!(chosen(Collective::AllGather, &topology, bytes).algorithm, Algorithm::HierMesh);
    }
    let many = Topology::blocks(512, 8);
    assert_eq!(chosen(Collective::AllGather, &many, 64 * KIB).algorithm, Algorithm::HierLog);
    assert_eq!(chosen(Collective::Broadcast, &many, 64).algorithm, Algorithm::HierLog);
    assert_eq!(chosen(Collective::Broadcast, &many, 64 * KIB).algorithm, Algorithm::HierTree);
    let tokens = chosen(Collective::Barrier, &many, 0);
    assert_eq!(tokens.algorithm, Algorithm::HierLog);
}

#[test]
fn every_collective_has_an_algorithm_on_any_split() {
    for labels in [vec![0, 1], vec![0, 1, 0, 2, 1, 1, 1], vec![0, 0, 0, 0, 1]] {
        let topology = Topology::from_labels(&labels);
        for collective in Collective::ALL {
            for bytes in [0, 64, 100 * KIB, 64 * MIB] {
                for half in [false, true] {
                    let shape = Shape { half, ..shape(collective, labels.len(), bytes) };
                    let choice = choose_in(&shape, &topology);
                    assert!(choice.algorithm.is_hierarchical(), "{shape:?}");
                    assert!(!(half && collective.reduces() && choice.algorithm.rounds_per_hop()));
                    // A forced algorithm need not treat all_to_all as uneven.
                    if collective != Collective::AllToAll {
                        assert_eq!(named_in(choice.algorithm, &shape, &topology), Some(choice), "{shape:?}");
                    }
                }
            }
        }
    }
}

/// In the mesh the largest node would send more than any node has to receive.
#[test]
fn large_gathers_of_uneven_nodes_use_the_ring() {
    let topology = Topology::from_labels(&[0, 1, 1, 2, 2, 2]);
    assert_eq!(chosen(Collective::AllGather, &topology, 16 * MIB).algorithm, Algorithm::HierRing);
    assert_eq!(chosen(Collective::ReduceScatter, &topology, 16 * MIB).algorithm, Algorithm::HierRing);
    assert_eq!(chosen(Collective::AllGather, &topology, KIB).algorithm, Algorithm::HierMesh);
    assert_eq!(chosen(Collective::AllReduce, &topology, 64 * KIB).algorithm, Algorithm::HierMesh);
}

#[test]
fn uneven_pairs_exchange_directly() {
    let shape = Shape { pairs: true, ..shape(Collective::AllToAll, 6, 6 * MIB) };
    let topology = Topology::blocks(3, 2);
    assert_eq!(choose_in(&shape, &topology).algorithm, Algorithm::HierMesh);
    assert_eq!(named_in(Algorithm::HierLog, &shape, &topology), None);
}

#[test]
fn measurements_never_select_the_algorithm_of_a_reduction() {
    let topology = Topology::blocks(6, 3);
    // One network has expensive hops, the other expensive messages.
    let long_path = Network { latency_ns: 1e6, message_ns: 0.0, bytes_per_ns: 100.0, ..Network::ASSUMED };
    let busy = Network { latency_ns: 0.0, message_ns: 1e5, bytes_per_ns: 100.0, ..Network::ASSUMED };
    for topology in
        [Topology::blocks(2, 1), Topology::blocks(5, 2), Topology::from_labels(&[0, 1, 1, 2, 2, 2])]
    {
        for collective in [Collective::AllReduce, Collective::ReduceScatter, Collective::Reduce] {
            for bytes in (3..28).map(|power| 1 << power) {
                let over = |network| {
                    let shape = Shape { network, ..shape(collective, topology.size(), bytes) };
                    choose_in(&shape, &topology).algorithm
                };
                for network in [long_path, busy, SLOW, FAST, LONG_PATH] {
                    assert_eq!(over(network), over(Network::ASSUMED), "{collective:?} {bytes} {network:?}");
                }
            }
        }
    }
    for collective in Collective::ALL {
        let mut differs = false;
        for bytes in [64, 64 * KIB, 64 * MIB] {
            let [a, b] = [long_path, busy].map(|network| {
                let shape = Shape { network, ..shape(collective, topology.size(), bytes) };
                choose_in(&shape, &topology).algorithm
            });
            differs |= a != b;
            assert!(a == b || !collective.reduces(), "{collective:?} {bytes}");
        }
        assert!(differs || collective != Collective::AllGather);
    }
}

const SLOW: Network =
    Network { latency_ns: 16_000.0, message_ns: 1_600.0, bytes_per_ns: 0.125, ..Network::ASSUMED };
const FAST: Network =
    Network { latency_ns: 16_000.0, message_ns: 1_600.0, bytes_per_ns: 40.0, ..Network::ASSUMED };
const LONG_PATH: Network =
    Network { latency_ns: 2.5e6, message_ns: 1_600.0, bytes_per_ns: 1.2, ..Network::ASSUMED };

#[test]
fn algorithm_of_a_gather_depends_on_the_network() {
    let topology = Topology::blocks(8, 1);
    let over = |network: Network, bytes: usize| {
        let shape = Shape { network, ..shape(Collective::AllGather, 8, bytes) };
        choose_in(&shape, &topology).algorithm
    };
    // Few messages if each is expensive, one hop on a long path.
    let expensive = Network { message_ns: 40_000.0, ..Network::ASSUMED };
    assert_eq!(over(expensive, 8 * KIB), Algorithm::HierLog);
    assert_eq!(over(LONG_PATH, 8 * KIB), Algorithm::HierMesh);
}

/// A busy host delays the messages of the measurement. Each rank of a mesh needs a connection to every other node.
#[test]
fn delays_of_a_busy_host_cause_no_mesh_of_many_nodes() {
    let busy = Network { latency_ns: 2.5e6, message_ns: 16e3, bytes_per_ns: 0.0125, ..Network::ASSUMED };
    let algorithm = |collective, nodes, network| {
        let topology = Topology::blocks(nodes, 1);
        choose_in(&Shape { network, ..shape(collective, nodes, 8 * nodes) }, &topology).algorithm
    };
    for collective in [Collective::Barrier, Collective::AllGather] {
        assert_eq!(algorithm(collective, 16, busy), Algorithm::HierMesh, "{collective:?}");
        for nodes in [129, 300, 1024] {
            assert_ne!(algorithm(collective, nodes, busy), Algorithm::HierMesh, "{collective:?} {nodes}");
        }
        // Messages without connections.
        let fabric = Network { incast: 1.0, ..busy };
        assert_eq!(algorithm(collective, 300, fabric), Algorithm::HierMesh, "{collective:?}");
    }
}

/// `hier-log` runs its rounds in one loop. An all_gather of 16 MiB on 4 nodes at 1 Gbit/s with a round
/// trip of 10 ms takes 491 ms; by the ring 105 ms.
#[test]
fn large_gathers_on_long_paths_avoid_one_round_trip_per_iteration() {
    for latency_ns in [0.63e6, 2.5e6, 6.3e6, 25e6] {
        let network = Network { latency_ns, bytes_per_ns: 0.125, ..Network::ASSUMED };
        for (nodes, bytes) in [(4, 16 * MIB), (4, 64 * MIB), (8, 64 * MIB)] {
            let shape = Shape { network, ..shape(Collective::AllGather, nodes, bytes) };
            let chosen = choose_in(&shape, &Topology::blocks(nodes, 1));
            assert_ne!(chosen.algorithm, Algorithm::HierLog, "{nodes} nodes, {bytes} bytes, {latency_ns} ns");
        }
    }
}

/// The buffers of one stream fill a path with a round trip of 10 ms, but not one with 50 ms. There each
/// link carries several streams.
#[test]
fn gather_uses_several_streams_where_one_does_not_fill_the_path() {
    let over = |latency_ns, bytes_per_ns, bytes| {
        let network = Network { latency_ns, bytes_per_ns, ..Network::ASSUMED };
        let shape = Shape { network, ..shape(Collective::AllGather, 4, bytes) };
        choose_in(&shape, &Topology::blocks(4, 1)).algorithm
    };
    for bytes in [16 * MIB, 64 * MIB] {
        // On such a long path the probe measures the rate of one stream.
        for bytes_per_ns in [0.05, 0.079, 0.125] {
            assert_eq!(over(25e6, bytes_per_ns, bytes), Algorithm::HierMesh, "{bytes_per_ns}");
        }
        assert_eq!(over(0.5e6, 0.125, bytes), Algorithm::HierRing);
    }
    assert_eq!(over(5e6, 0.125, 64 * MIB), Algorithm::HierRing);
}

#[test]
fn segments_fit_the_network_for_any_collective() {
    for collective in [Collective::AllGather, Collective::AllReduce, Collective::ReduceScatter] {
        let topology = Topology::blocks(4, 2);
        let segment = |network: Network, bytes: usize| {
            let shape = Shape { network, ..shape(collective, 8, bytes) };
            choose_in(&shape, &topology).segment
        };
        for bytes in [512 * KIB, 64 * MIB] {
            let usual = segment(Network::ASSUMED, bytes);
            assert!(segment(SLOW, bytes) < usual, "{collective:?} {bytes}");
            // Measurements of the same network vary.
            for (message_ns, bytes_per_ns) in [(630.0, 1.0), (1_600.0, 1.0), (2_500.0, 0.63)] {
                let network = Network { message_ns, bytes_per_ns, ..Network::ASSUMED };
                assert_eq!(segment(network, bytes), usual);
            }
        }
        assert!(segment(FAST, 64 * MIB) > segment(Network::ASSUMED, 64 * MIB));
        // The segment size does not depend on the path length.
        assert_eq!(segment(LONG_PATH, 64 * MIB), segment(Network::ASSUMED, 64 * MIB));
    }
}

#[test]
fn window_covers_the_bandwidth_delay_product() {
    for collective in [Collective::AllGather, Collective::AllReduce, Collective::ReduceScatter] {
        for (round_trip_ms, gbit) in [(0.1, 1.0), (1.0, 1.0), (10.0, 1.0), (50.0, 1.0), (5.0, 9.6)] {
            let network = Network {
                latency_ns: round_trip_ms * 1e6 / 2.0,
                bytes_per_ns: gbit / 8.0,
                ..Network::ASSUMED
            };
            let shape = Shape { network, ..shape(collective, 2, 64 * MIB) };
            let choice = choose_in(&shape, &Topology::blocks(2, 1));
            let in_flight = choice.window() * choice.segment;
            let expected = round_trip_ms * 1e6 * gbit / 8.0;
            assert!(in_flight as f64 >= 2.5 * expected, "{collective:?} {round_trip_ms} ms: {choice:?}");
        }
    }
}

#[test]
fn window_stays_within_its_share_of_the_staging() {
    let network = Network { latency_ns: 1e8, bytes_per_ns: 12.5, ..Network::ASSUMED };
    for (nodes, each) in [(2, 1), (4, 2), (64, 1), (256, 8)] {
        let topology = Topology::blocks(nodes, each);
        for staging in [MIB, 64 * MIB, 512 * MIB] {
            let shape =
                Shape { network, staging, ..shape(Collective::ReduceScatter, topology.size(), 256 * MIB) };
            for algorithm in [Algorithm::HierMesh, Algorithm::HierRing] {
                let choice = named_in(algorithm, &shape, &topology).unwrap();
                let received = (nodes - 1) * choice.segment * choice.window();
                // The last slot of each channel may exceed the share.
                assert!(received <= staging / 2 + (nodes - 1) * choice.segment, "{choice:?}");
            }
        }
    }
}

#[test]
fn short_path_needs_no_more_cells_than_a_node() {
    let fast = Network { bytes_per_ns: 3.1, ..Network::ASSUMED };
    for network in [Network::ASSUMED, fast] {
        let shape = Shape { network, ..shape(Collective::AllReduce, 8, 64 * MIB) };
        let choice = choose_in(&shape, &Topology::blocks(4, 2));
        assert_eq!(choice.window(), choice.depth, "{choice:?}");
    }
}

#[test]
fn forced_algorithms_are_accepted_where_possible() {
    let (one, two) = (Topology::single(4), Topology::blocks(2, 2));
    let shape = shape(Collective::AllReduce, 4, MIB);
    for algorithm in Algorithm::ALL {
        // On one node `hier` is the mesh, and `hier-publish` is `publish`.
        let twice = matches!(algorithm, Algorithm::HierMesh | Algorithm::HierPublish);
        assert_eq!(named_in(algorithm, &shape, &one).is_some(), !twice, "{algorithm:?}");
    }
    assert_eq!(named_in(Algorithm::Publish, &shape, &two), None);
    assert!(named_in(Algorithm::HierRing, &shape, &two).is_some());
    assert_eq!(
        named_in(Algorithm::HierLog, &Shape { collective: Collective::ReduceScatter, ..shape }, &two),
        None
    );
}

/// The mesh of 256 nodes reserves slots for 255 senders.
#[test]
fn receive_cells_use_at_most_a_quarter_of_the_staging() {
    for (nodes, each) in [(64, 1), (64, 8), (256, 1), (256, 8)] {
        let topology = Topology::blocks(nodes, each);
        for collective in [Collective::AllGather, Collective::ReduceScatter, Collective::AllReduce] {
            let shape = shape(collective, topology.size(), 256 * MIB);
            for algorithm in [Algorithm::HierMesh, Algorithm::HierRing, Algorithm::Mesh] {
                let choice = named_in(algorithm, &shape, &topology).unwrap();
                let received = (nodes - 1) * choice.segment * choice.depth;
                assert!(received <= shape.staging / 4, "{algorithm:?} {collective:?} {choice:?}");
            }
        }
    }
}
