//! Traffic of the plans between nodes: each byte crosses a node link once, as in the formula.

mod support;

use smddp_plan::check::{Link, Operation, Sizes, programs, traffic};
use smddp_plan::{Algorithm, Collective, Topology};
use support::{Rng, in_blocks, partitions, round_robin};

fn links(
    algorithm: Algorithm,
    collective: Collective,
    topology: &Topology,
    root: usize,
    blocks: &[usize],
) -> Option<Vec<Link>> {
    let programs = programs(algorithm, collective, topology, root, false)?;
    let sizes = Sizes::Blocks(blocks.to_vec());
    let op = Operation { collective, root, programs: &programs, sizes: &sizes, in_place: false };
    Some(traffic(&op, topology).expect("a channel stays inside a node or leaves it"))
}

fn topologies() -> Vec<Topology> {
    let mut rng = Rng(2);
    let splits: Vec<Vec<usize>> = (2..=12).flat_map(partitions).filter(|split| split.len() > 1).collect();
    splits.iter().flat_map(|split| [in_blocks(split), round_robin(split), rng.shuffled(split)]).collect()
}

/// Algorithms that send no byte twice.
fn minimal_traffic(collective: Collective) -> Vec<Algorithm> {
    use Algorithm::*;
    match collective {
        Collective::AllGather => vec![HierMesh, HierRing, HierRecursive, HierLog],
        Collective::ReduceScatter | Collective::AllReduce => vec![HierMesh, HierRing, HierRecursive],
        _ => vec![HierMesh, HierRing],
    }
}

/// Returns the bytes of the blocks of a node's ranks.
fn owned(topology: &Topology, node: usize, blocks: &[usize]) -> u64 {
    topology.ranks_of(node).iter().map(|&rank| blocks[rank] as u64).sum()
}

#[test]
fn traffic_of_equal_nodes_matches_the_formula() {
    const BLOCK: usize = 960;
    for (nodes, each) in [(2, 1), (2, 4), (3, 2), (4, 2), (5, 3), (8, 8), (13, 1), (32, 8)] {
        let topology = Topology::blocks(nodes, each);
        let blocks = vec![BLOCK; nodes * each];
        let whole = (nodes * each * BLOCK) as u64;
        let share = whole / nodes as u64 * (nodes as u64 - 1);
        for (collective, bytes) in [
            (Collective::AllGather, share),
            (Collective::ReduceScatter, share),
            (Collective::AllReduce, 2 * share),
            (Collective::AllToAll, share * each as u64),
        ] {
            for algorithm in
                minimal_traffic(collective).into_iter().filter(|_| collective != Collective::AllToAll)
            {
                for link in links(algorithm, collective, &topology, 0, &blocks).unwrap() {
                    let moved = (link.bytes_in, link.bytes_out);
                    assert_eq!(moved, (bytes, bytes), "{algorithm:?} {collective:?} {nodes} x {each}");
                }
            }
            if collective == Collective::AllToAll {
                for link in links(Algorithm::HierMesh, collective, &topology, 0, &blocks).unwrap() {
                    assert_eq!((link.bytes_in, link.bytes_out), (bytes, bytes), "{nodes} x {each}");
                }
            }
        }
    }
}

/// Each node receives each missing byte once, and the total sent volume is the same.
#[test]
fn uneven_nodes_receive_each_byte_once() {
    let mut rng = Rng(3);
    for topology in topologies() {
        let blocks: Vec<usize> = (0..topology.size()).map(|_| rng.below(5) * 64).collect();
        let whole: u64 = blocks.iter().map(|&b| b as u64).sum();
        let nodes = 0..topology.nodes();
        let missing: Vec<u64> = nodes.clone().map(|n| whole - owned(&topology, n, &blocks)).collect();
        let all: u64 = missing.iter().sum();
        for algorithm in minimal_traffic(Collective::AllGather) {
            let links = links(algorithm, Collective::AllGather, &topology, 0, &blocks).unwrap();
            let entered: Vec<u64> = links.iter().map(|l| l.bytes_in).collect();
            assert_eq!(entered, missing, "{algorithm:?} {topology:?} {blocks:?}");
            assert_eq!(links.iter().map(|l| l.bytes_out).sum::<u64>(), all);
        }
        for algorithm in minimal_traffic(Collective::ReduceScatter) {
            // The reverse: one sum leaves the node for each block of another node.
            let links_of = |collective| links(algorithm, collective, &topology, 0, &blocks).unwrap();
            let scatter = links_of(Collective::ReduceScatter);
            let left: Vec<u64> = scatter.iter().map(|l| l.bytes_out).collect();
            assert_eq!(left, missing, "{algorithm:?} {topology:?} {blocks:?}");
            assert_eq!(scatter.iter().map(|l| l.bytes_in).sum::<u64>(), all);
        }
    }
}

/// An all_reduce is divided by nodes, independent of the ranks per node.
#[test]
fn all_reduce_loads_uneven_nodes_equally() {
    for topology in topologies() {
        let (nodes, size) = (topology.nodes() as u64, topology.size() as u64);
        let blocks = vec![64; topology.size()];
        let all = 2 * (nodes - 1) * size * 64;
        for algorithm in minimal_traffic(Collective::AllReduce) {
            let links = links(algorithm, Collective::AllReduce, &topology, 0, &blocks).unwrap();
            assert_eq!(links.iter().map(|l| l.bytes_in).sum::<u64>(), all, "{algorithm:?} {topology:?}");
            assert_eq!(links.iter().map(|l| l.bytes_out).sum::<u64>(), all, "{algorithm:?} {topology:?}");
            // Shares are whole blocks.
            for link in links.iter().filter(|_| algorithm == Algorithm::HierMesh) {
                let most = all / nodes + (nodes - 1) * 64;
                assert!(link.bytes_in <= most && link.bytes_out <= most, "{topology:?} {links:?}");
            }
        }
    }
}

/// In the mesh a node sends exactly its own blocks to each other node.
#[test]
fn mesh_nodes_send_only_their_own_blocks() {
    for topology in topologies() {
        let blocks: Vec<usize> = (0..topology.size()).map(|b| b + 1).collect();
        let links = links(Algorithm::HierMesh, Collective::AllGather, &topology, 0, &blocks).unwrap();
        for (node, link) in links.iter().enumerate() {
            let others = topology.nodes() as u64 - 1;
            assert_eq!(link.bytes_out, owned(&topology, node, &blocks) * others, "{topology:?}");
        }
    }
}

#[test]
fn broadcast_enters_each_node_once_and_leaves_the_root_once() {
    use Algorithm::*;
    for topology in topologies() {
        let blocks = vec![64; topology.size()];
        let whole = 64 * topology.size() as u64;
        let root = topology.size() / 2;
        // Shares of nodes are whole blocks.
        let most = whole + 64 * topology.nodes() as u64;
        for algorithm in [HierMesh, HierRing, HierTree, HierLog, HierPublish] {
            let links = links(algorithm, Collective::Broadcast, &topology, root, &blocks).unwrap();
            for (node, link) in links.iter().enumerate() {
                let here = node == topology.node_of(root);
                assert_eq!(link.bytes_in, if here { 0 } else { whole }, "{algorithm:?} {topology:?}");
                let once = !matches!(algorithm, HierLog | HierPublish);
                assert!(!once || !here || link.bytes_out == whole, "{algorithm:?} {topology:?}");
                assert!(!once || link.bytes_out <= most, "{algorithm:?} {topology:?}");
            }
        }
    }
}

#[test]
fn reduce_leaves_each_node_once_and_enters_the_root_once() {
    use Algorithm::*;
    for topology in topologies() {
        let blocks = vec![64; topology.size()];
        let whole = 64 * topology.size() as u64;
        let root = topology.size() - 1;
        let most = whole + 64 * topology.nodes() as u64;
        for algorithm in [HierMesh, HierRing, HierTree, HierLog, HierPublish] {
            let links = links(algorithm, Collective::Reduce, &topology, root, &blocks).unwrap();
            let top = &links[topology.node_of(root)];
            let once = !matches!(algorithm, HierLog | HierPublish);
            assert!(!once || top.bytes_in == whole, "{algorithm:?} {topology:?} {links:?}");
            for link in &links {
                assert!(link.bytes_out <= whole, "{algorithm:?} {topology:?} {links:?}");
                assert!(!once || link.bytes_in <= most, "{algorithm:?} {topology:?} {links:?}");
            }
        }
    }
}

/// `hier-log` exists for its low number of messages.
#[test]
fn hier_log_sends_few_messages_per_node() {
    let topology = Topology::blocks(64, 4);
    let blocks = vec![64; 256];
    let messages = |algorithm| {
        let links = links(algorithm, Collective::AllGather, &topology, 0, &blocks).unwrap();
        links.iter().map(|l| l.messages_out.max(l.messages_in)).max().unwrap()
    };
    assert_eq!(messages(Algorithm::HierMesh), 63 * 4);
    // Six rounds, one message per rail, and one more if the blocks wrap around.
    assert!(messages(Algorithm::HierLog) <= 6 * 5, "{}", messages(Algorithm::HierLog));
}
