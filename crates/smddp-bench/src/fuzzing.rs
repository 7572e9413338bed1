//! Fuzz targets for input files. See `fuzz/`.

use crate::cluster_file::parse;

/// Parses arbitrary bytes as a cluster file.
///
/// # Panics
/// An accepted file fails its own check or has a rate that is not finite.
pub fn cluster(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    if let Ok(cluster) = parse(text, "cluster.toml") {
        assert_eq!(cluster.check(), Ok(()));
        assert!(cluster.nodes() <= cluster.size());
        for node in 0..cluster.nodes().min(64) {
            assert!(cluster.rail_bytes_per_s(node).is_finite());
        }
    }
}

#[cfg(test)]
#[path = "../../../fuzz/over.rs"]
mod over;

#[test]
fn arbitrary_cluster_files_are_parsed_or_rejected() {
    over::over("cluster", cluster, over::MANY);
}
