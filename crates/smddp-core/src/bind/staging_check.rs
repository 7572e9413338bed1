//! Check that the staging memory can ever hold the slots of a call.

use smddp_process::Endpoint;

use super::{BoundCall, GroupFacts};
use crate::error::{Error, Result};

/// Rejects a bound call whose slots exceed the staging memory: it would wait until its deadline. The planner's own
/// choices fit; forced settings may not.
pub(crate) fn check(bound: &BoundCall, facts: &GroupFacts, call: &str, cap: usize) -> Result<()> {
    let channel_layout = &bound.channel_layout;
    let local = |rank: usize| facts.topology.share_node(rank, facts.rank);
    let slots = |slot_bytes: usize, count: usize| slot_bytes.next_multiple_of(64).saturating_mul(count);
    let window = |messages: u64| (messages.min(channel_layout.window as u64) as usize).max(1);
    // Slots in shared memory and slots for other nodes are allocated separately.
    let (mut local_bytes, mut remote_bytes) = (0usize, 0usize);
    for send_channel in &channel_layout.send_channels {
        if send_channel.readers.iter().any(|&rank| local(rank)) && !channel_layout.inline {
            local_bytes = local_bytes.saturating_add(slots(send_channel.slot_bytes, channel_layout.depth.1));
        }
        if send_channel.readers.iter().any(|&rank| !local(rank)) {
            remote_bytes =
                remote_bytes.saturating_add(slots(send_channel.slot_bytes, window(send_channel.messages)));
        }
    }
    for recv_channel in channel_layout.recv_channels.iter().filter(|recv_channel| !local(recv_channel.rank)) {
        remote_bytes =
            remote_bytes.saturating_add(slots(recv_channel.slot_bytes, window(recv_channel.messages)));
    }
    let (required, limit) = (local_bytes.max(remote_bytes), Endpoint::max_region(cap));
    if required <= limit {
        return Ok(());
    }
    let channels = channel_layout.send_channels.len() + channel_layout.recv_channels.len();
    Err(Error::Invalid(format!(
        "{call}: {channels} channels with segments of {} bytes need {required} bytes of staging memory at once, but at most {limit} are \
         available (SMDDP_STAGING_BYTES={cap}); reduce SMDDP_SEGMENT_BYTES or increase SMDDP_STAGING_BYTES",
        bound.choice.segment
    )))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, OnceLock};

    use smddp_group::Routes;
    use smddp_plan::{Algorithm, Collective, Counts, Memory, Topology};

    use super::*;
    use crate::bind::bind;
    use crate::call::key::Key;
    use crate::call::types::DType;
    use crate::config::Config;

    /// Checks an all_to_all with blocks of 64 MiB on 40 ranks, `each` ranks per node.
    fn exchanged(each: usize, config: &Config) -> Result<()> {
        let nodes: Vec<usize> = (0..40).map(|rank| rank / each).collect();
        let topology = Topology::from_labels(&nodes);
        let (routes, network) = (Arc::new(Routes::local(0, topology.size())), OnceLock::new());
        let facts = GroupFacts {
            rank: 0,
            topology,
            inline_bytes: 0,
            routes,
            assumed: GroupFacts::assumed(""),
            network,
            canonical: OnceLock::new(),
        };
        let counts = Counts::Even(16 << 20);
        let (collective, dtype, memory) = (Collective::AllToAll, DType::F32, Memory::Host);
        let key =
            Key { collective, dtype, redop: 0, root: 0, factor: 0, counts, memory, site: 0, lossless: false };
        check(&bind(&key, &facts, config)?, &facts, "all_to_all", config.staging)
    }

    #[test]
    fn segments_beyond_the_staging_memory_are_rejected() {
        let large = Config { segment: Some(64 << 20), algorithm: Some(Algorithm::Mesh), ..Config::default() };
        let between_nodes = Config { algorithm: Some(Algorithm::HierMesh), ..large.clone() };
        for (each, config) in [(40, &large), (1, &between_nodes)] {
            let error = exchanged(each, config).unwrap_err().to_string();
            assert!(error.contains("SMDDP_SEGMENT_BYTES") && error.contains("67108864"), "{error}");
            let small = Config { segment: Some(64 << 10), ..config.clone() };
            assert_eq!(exchanged(each, &small), Ok(()));
        }
        for each in [1, 8, 40] {
            assert_eq!(exchanged(each, &Config::default()), Ok(()));
        }
    }
}
