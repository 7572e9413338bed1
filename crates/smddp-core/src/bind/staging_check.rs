//! Whether an operation can ever have the memory that it works with.

use smddp_transport::process::Endpoint;

use super::{BoundCall, GroupFacts};
use crate::error::{Error, Result};

/// Refuses a bound call whose cells the staging memory could never hold: it would wait for them until its deadline. What is
/// chosen here fits by far; what a setting forces may not.
pub(crate) fn check(bound: &BoundCall, facts: &GroupFacts, call: &str, cap: usize) -> Result<()> {
    let channel_layout = &bound.channel_layout;
    let local = |rank: usize| facts.topology.share_node(rank, facts.rank);
    let cells = |cell: usize, count: usize| cell.next_multiple_of(64).saturating_mul(count);
    let window = |messages: u64| (messages.min(channel_layout.window as u64) as usize).max(1);
    // One piece of memory for what goes through shared memory, one for what crosses the wire.
    let (mut inside, mut between) = (0usize, 0usize);
    for send_channel in &channel_layout.send_channels {
        if send_channel.readers.iter().any(|&rank| local(rank)) && !channel_layout.inline {
            inside = inside.saturating_add(cells(send_channel.cell, channel_layout.depth.1));
        }
        if send_channel.readers.iter().any(|&rank| !local(rank)) {
            between = between.saturating_add(cells(send_channel.cell, window(send_channel.messages)));
        }
    }
    for recv_channel in channel_layout.recv_channels.iter().filter(|recv_channel| !local(recv_channel.rank)) {
        between = between.saturating_add(cells(recv_channel.cell, window(recv_channel.messages)));
    }
    let (need, most) = (inside.max(between), Endpoint::most_at_once(cap));
    if need <= most {
        return Ok(());
    }
    let channels = channel_layout.send_channels.len() + channel_layout.recv_channels.len();
    Err(Error::Invalid(format!(
        "{call}: {channels} channels with pieces of {} bytes need {need} bytes of staging memory at once, and there are never more \
         than {most} (SMDDP_STAGING_BYTES is {cap}); take smaller pieces (SMDDP_SEGMENT_BYTES) or more staging memory",
        bound.choice.segment
    )))
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, OnceLock};

    use smddp_plan::{Algorithm, Collective, Counts, Memory, Topology};
    use smddp_transport::Routes;

    use super::*;
    use crate::bind::bind;
    use crate::call::key::Key;
    use crate::call::types::DType;
    use crate::config::Config;

    /// What becomes of an all_to_all of blocks of 64 MiB on 40 ranks, on nodes of so many.
    fn exchanged(each: usize, config: &Config) -> Result<()> {
        let nodes: Vec<usize> = (0..40).map(|rank| rank / each).collect();
        let topology = Topology::from_labels(&nodes);
        let (routes, network) = (Arc::new(Routes::local(0, topology.size())), OnceLock::new());
        let facts = GroupFacts {
            rank: 0,
            topology,
            slot: 0,
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
    fn pieces_that_no_staging_could_hold_are_refused_and_not_waited_for() {
        let large = Config { segment: Some(64 << 20), algorithm: Some(Algorithm::Mesh), ..Config::default() };
        let between = Config { algorithm: Some(Algorithm::HierMesh), ..large.clone() };
        for (each, config) in [(40, &large), (1, &between)] {
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
