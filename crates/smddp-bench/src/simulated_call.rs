//! A call on a described cluster, with the engine's decisions.

use std::io::{IsTerminal, stderr};

use smddp_core::preview::{HypotheticalCall, HypotheticalGroup};
use smddp_core::{Collective, Config, DType};
use smddp_plan::sim::{Cluster, Job, SearchResult, search};
use smddp_plan::{Algorithm, Memory};

use crate::error::{Error, Result};
use crate::progress::Progress;

pub(crate) struct SimulatedCall<'a> {
    cluster: &'a Cluster,
    call: HypotheticalCall,
    config: Config,
}

impl<'a> SimulatedCall<'a> {
    /// Returns a call with the current settings.
    pub(crate) fn new(
        cluster: &'a Cluster,
        collective: Collective,
        bytes: usize,
        root: usize,
        half: bool,
    ) -> Result<Self> {
        Ok(Self::with_config(Config::get()?.clone(), cluster, collective, bytes, root, half))
    }

    fn with_config(
        config: Config,
        cluster: &'a Cluster,
        collective: Collective,
        bytes: usize,
        root: usize,
        half: bool,
    ) -> Self {
        let dtype = if half { DType::F16 } else { DType::F32 };
        // Ranks without shared host memory use device memory.
        let memory = if cluster.local_multicast { Memory::Host } else { Memory::Reference };
        let call = HypotheticalCall {
            root,
            memory,
            ..HypotheticalCall::new(collective, dtype, bytes, cluster.size())
        };
        Self { cluster, call, config }
    }

    /// Sets the segment size, as `SMDDP_SEGMENT_BYTES`.
    pub(crate) fn segment(mut self, segment: Option<usize>) -> Self {
        self.config.segment = segment.or(self.config.segment);
        self
    }

    /// Sets the algorithm, as `SMDDP_ALGO`. It must support the collective.
    pub(crate) fn algorithm(mut self, algorithm: Option<Algorithm>) -> Result<Self> {
        let Some(algorithm) = algorithm else { return Ok(self) };
        self.config.algorithm = Some(algorithm);
        if self.job().decision.choice.algorithm == algorithm {
            return Ok(self);
        }
        let name = smddp_plan::tune::collective_name(self.call.collective);
        Err(Error::Usage(format!("{} does not support {name} on this cluster", algorithm.name())))
    }

    fn group(&self) -> HypotheticalGroup<'_> {
        HypotheticalGroup::new(self.cluster.topology(), self.cluster.network_model(), &self.config)
    }

    /// Returns the engine's plan.
    pub(crate) fn job(&self) -> Job {
        let decision = self.group().decide(&self.call);
        Job { collective: self.call.collective, root: self.call.root, decision }
    }

    /// Returns the alternatives to the engine's plan. Displays the current one on a terminal.
    pub(crate) fn alternatives(&self) -> SearchResult {
        let group = self.group();
        let (shape, group, settings) = group.planner_request(&self.call);
        let mut progress = Progress::idle(stderr().is_terminal().then(stderr));
        let mut begins = |job: &Job, messages: u64| {
            let (nodes, name) = (self.cluster.nodes(), job.decision.choice.algorithm.name());
            let millions = messages as f64 / 1e6;
            progress.show(&format!("simulating {name} on {nodes} nodes, {millions:.1} million messages"));
        };
        search(self.cluster, &shape, self.call.root, &group, &settings, &mut begins)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smddp_core::variant_name;
    use smddp_plan::tune::Table;
    use smddp_plan::{Choice, Format, Formats, Reason};

    /// Deterministic pseudorandom numbers.
    struct Random(u64);

    impl Random {
        fn below(&mut self, end: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % end
        }
        fn of<T: Copy>(&mut self, list: &[T]) -> T {
            list[self.below(list.len())]
        }
    }

    fn cluster(random: &mut Random) -> Cluster {
        let nodes = random.of(&[1, 1, 2, 2, 3, 4, 5, 7, 8, 16]);
        let each = random.of(&[1, 1, 2, 3, 4, 8]);
        let mut cluster = match random.below(3) {
            0 => Cluster::p4d(nodes),
            1 => Cluster::p5(nodes),
            _ => Cluster::sockets(nodes, each),
        };
        if random.below(4) == 0 {
            cluster.ranks = (0..nodes).map(|_| 1 + random.below(4)).collect();
        }
        cluster
    }

    fn config(random: &mut Random) -> Config {
        let some = random.below(3) == 0;
        Config {
            algorithm: some.then(|| random.of(&Algorithm::ALL)),
            segment: (random.below(5) == 0).then(|| 1 + random.below(1 << 20)),
            staging: random.of(&[1 << 20, 8 << 20, 64 << 20, 64 << 20]),
            tune: match random.below(4) {
                0 => Table::parse("all_gather:0-1m:@hier-log#all_reduce:4k-inf:@hier-ring#broadcast:@tree")
                    .unwrap(),
                _ => Table::default(),
            },
            formats: Formats::parse(random.of(&["", "", "bf16", "all_gather=f16,all_reduce=int8"])).unwrap(),
            ..Config::default()
        }
    }

    /// Returns the writes of all ranks in the engine's binding, counted as in a replay: messages into the network, bytes of
    /// each node into the network, messages inside nodes. `None` if the engine rejects the plan (device memory).
    fn bound(call: &SimulatedCall<'_>) -> Option<(u64, Vec<u64>, u64)> {
        let (group, node_of) = (call.group(), call.cluster.node_of());
        let (mut messages, mut bytes, mut local) = (0, vec![0; call.cluster.nodes()], 0);
        for rank in 0..call.cluster.size() {
            for send_channels in group.send_channels(rank, &call.call).ok()? {
                let remote =
                    send_channels.readers.iter().filter(|&&reader| node_of[reader] != node_of[rank]).count();
                messages += remote as u64 * send_channels.messages;
                bytes[node_of[rank]] += remote as u64 * send_channels.bytes;
                local += if remote < send_channels.readers.len() { send_channels.messages } else { 0 };
            }
        }
        Some((messages, bytes, local))
    }

    fn check(call: &SimulatedCall<'_>, replayed: &mut usize) {
        let job = call.job();
        let Choice { algorithm, segment, .. } = job.decision.choice;
        let depth = job.decision.choice.window();
        let described = call.group().path("shm", &call.call);
        let name = variant_name((algorithm, job.decision.format));
        let expected = match job.decision.inline {
            true => "shm publish, one message".to_owned(),
            false => {
                format!("shm {name}, segments of {} KiB, {depth} slots", segment.div_ceil(1024))
            }
        };
        let instead = match job.decision.reason {
            Reason::Unsupported(wanted) => format!(" ({} does not support this call)", wanted.name()),
            _ => String::new(),
        };
        assert_eq!(described, expected + &instead);
        if call.cluster.size() > 40 || job.messages(call.cluster) > 4_000 {
            return;
        }
        let Some((messages, bytes, local)) = bound(call) else { return };
        let run = job.run(call.cluster, Vec::new()).unwrap();
        let context = format!("{:?} {:?} {:?}", call.call, call.cluster.ranks, job.decision.choice);
        assert_eq!(run.outcome.network_messages, messages, "{context}");
        for (replayed, bound) in run.outcome.out_bytes.iter().zip(bytes) {
            // The replay counts the scales of a message as for a single block.
            let scales = if job.decision.format == Some(Format::Int8) { bound / 100 } else { 0 };
            assert!(replayed.abs_diff(bound) <= scales, "{replayed} instead of {bound} bytes, {context}");
        }
        assert_eq!(run.outcome.local_messages, local, "{context}");
        *replayed += 1;
    }

    /// Checks that the described and simulated plans equal the engine's binding in choice, blocks and segments.
    #[test]
    fn described_and_simulated_plans_match_the_engines_binding() {
        let mut random = Random(7);
        let mut replayed = 0;
        for _ in 0..2_500 {
            let (cluster, config) = (cluster(&mut random), config(&mut random));
            let collective = random.of(&Collective::ALL);
            let root = if collective.has_root() { random.below(cluster.size()) } else { 0 };
            // All magnitudes, divisible or not; small sizes have empty blocks.
            let bytes = (1 << random.below(25)) + random.of(&[0, 0, 4, 68, 1_000]);
            let half = random.below(4) == 0;
            check(
                &SimulatedCall::with_config(config, &cluster, collective, bytes, root, half),
                &mut replayed,
            );
        }
        assert!(replayed > 1_000, "{replayed}");
    }
}
