//! Lower bound of any plan: the bytes that must cross each node link, divided by its rate.

use super::cluster::Cluster;
use crate::ir::Collective;

/// Returns the bytes that must leave and reach each node in a collective of `bytes` (the whole buffer, as
/// nccl-tests counts). For all_reduce: `2 (N-1)/N` of the buffer, which a balanced plan achieves.
pub fn link_bytes_least(
    cluster: &Cluster,
    collective: Collective,
    bytes: u64,
    root: usize,
) -> Vec<(u64, u64)> {
    use Collective::*;
    let (nodes, size) = (cluster.nodes() as f64, cluster.size() as f64);
    let home = cluster.node_of().get(root).copied().unwrap_or(0);
    let all = bytes as f64;
    let of = |node: usize| {
        let ranks = cluster.ranks[node] as f64;
        let own = all * ranks / size;
        let others = all - own;
        let root = node == home;
        let (out, inward) = match collective {
            // Each node must send its own blocks once and receive all others.
            AllGather | ReduceScatter => (own, others),
            AllReduce => (2.0 * all * (nodes - 1.0) / nodes, 2.0 * all * (nodes - 1.0) / nodes),
            Broadcast | Reduce if root => (all, 0.0),
            Broadcast | Reduce => (0.0, all),
            Scatter | Gather if root => (others, 0.0),
            Scatter | Gather => (0.0, own),
            AllToAll => (ranks * others, ranks * others),
            Barrier => (0.0, 0.0),
        };
        // Contributions to these move in the opposite direction.
        let back = matches!(collective, ReduceScatter | Reduce | Gather);
        if back { (inward, out) } else { (out, inward) }
    };
    if cluster.nodes() < 2 {
        return vec![(0, 0); cluster.nodes()];
    }
    (0..cluster.nodes()).map(of).map(|(out, inward)| (out.round() as u64, inward.round() as u64)).collect()
}

/// Returns the seconds of the busiest link if all other costs are zero; 0 on one node.
pub fn line_seconds(cluster: &Cluster, collective: Collective, bytes: u64, root: usize) -> f64 {
    let least = link_bytes_least(cluster, collective, bytes, root);
    let time =
        |(node, (out, inward)): (usize, &(u64, u64))| *out.max(inward) as f64 / cluster.line_rate(node);
    least.iter().enumerate().map(time).fold(0.0, f64::max)
}
