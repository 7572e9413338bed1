//! A call on a described cluster, as the engine would make it there.

use smddp_core::preview::{Absent, Imagined};
use smddp_core::{Collective, Config, DType};
use smddp_plan::sim::{Cluster, Job, SearchResult, search};
use smddp_plan::{Algorithm, Memory};

use crate::error::{Error, Result};

pub(crate) struct Subject<'a> {
    cluster: &'a Cluster,
    call: Imagined,
    config: Config,
}

impl<'a> Subject<'a> {
    /// With the settings in force.
    pub(crate) fn new(
        cluster: &'a Cluster,
        collective: Collective,
        bytes: usize,
        root: usize,
        half: bool,
    ) -> Result<Self> {
        Ok(Self::under(Config::get()?.clone(), cluster, collective, bytes, root, half))
    }

    fn under(
        config: Config,
        cluster: &'a Cluster,
        collective: Collective,
        bytes: usize,
        root: usize,
        half: bool,
    ) -> Self {
        let dtype = if half { DType::F16 } else { DType::F32 };
        // Ranks that do not share host memory have devices.
        let memory = if cluster.local_multicast { Memory::Host } else { Memory::Reference };
        let call = Imagined { root, memory, ..Imagined::new(collective, dtype, bytes, cluster.size()) };
        Self { cluster, call, config }
    }

    /// As `SMDDP_SEGMENT_BYTES` would have it.
    pub(crate) fn segment(mut self, segment: Option<usize>) -> Self {
        self.config.segment = segment.or(self.config.segment);
        self
    }

    /// As `SMDDP_ALGO` would have it, but that it must do the collective.
    pub(crate) fn algorithm(mut self, algorithm: Option<Algorithm>) -> Result<Self> {
        let Some(algorithm) = algorithm else { return Ok(self) };
        self.config.algorithm = Some(algorithm);
        if self.job().decision.choice.algorithm == algorithm {
            return Ok(self);
        }
        let name = smddp_plan::tune::collective_name(self.call.collective);
        Err(Error::Usage(format!("{} does not do {name} on this cluster", algorithm.name())))
    }

    fn group(&self) -> Absent<'_> {
        Absent::new(self.cluster.topology(), self.cluster.network_model(), &self.config)
    }

    /// What the engine would do.
    pub(crate) fn job(&self) -> Job {
        let decision = self.group().decide(&self.call);
        Job { collective: self.call.collective, root: self.call.root, decision }
    }

    /// What else it could do.
    pub(crate) fn others(&self) -> SearchResult {
        let group = self.group();
        let (shape, group, settings) = group.question(&self.call);
        search(self.cluster, &shape, self.call.root, &group, &settings)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use smddp_core::variant_name;
    use smddp_plan::tune::Table;
    use smddp_plan::{Choice, Format, Formats, Reason};

    /// Numbers by chance, the same in every run.
    struct Chance(u64);

    impl Chance {
        fn below(&mut self, end: usize) -> usize {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 33) as usize % end
        }
        fn of<T: Copy>(&mut self, list: &[T]) -> T {
            list[self.below(list.len())]
        }
    }

    fn cluster(chance: &mut Chance) -> Cluster {
        let nodes = chance.of(&[1, 1, 2, 2, 3, 4, 5, 7, 8, 16]);
        let each = chance.of(&[1, 1, 2, 3, 4, 8]);
        let mut cluster = match chance.below(3) {
            0 => Cluster::p4d(nodes),
            1 => Cluster::p5(nodes),
            _ => Cluster::sockets(nodes, each),
        };
        if chance.below(4) == 0 {
            cluster.ranks = (0..nodes).map(|_| 1 + chance.below(4)).collect();
        }
        cluster
    }

    fn config(chance: &mut Chance) -> Config {
        let some = chance.below(3) == 0;
        Config {
            algorithm: some.then(|| chance.of(&Algorithm::ALL)),
            segment: (chance.below(5) == 0).then(|| 1 + chance.below(1 << 20)),
            staging: chance.of(&[1 << 20, 8 << 20, 64 << 20, 64 << 20]),
            tune: match chance.below(4) {
                0 => Table::parse("all_gather:0-1m:@hier-log#all_reduce:4k-inf:@hier-ring#broadcast:@tree")
                    .unwrap(),
                _ => Table::default(),
            },
            formats: Formats::parse(chance.of(&["", "", "bf16", "all_gather=f16,all_reduce=int8"])).unwrap(),
            ..Config::default()
        }
    }

    /// What all ranks write in the engine's binding, as a replay counts it: messages and bytes of each node into the
    /// network, writes inside nodes. `None` where the engine refuses the plan (memory of a device).
    fn bound(subject: &Subject<'_>) -> Option<(u64, Vec<u64>, u64)> {
        let (group, node_of) = (subject.group(), subject.cluster.node_of());
        let (mut messages, mut bytes, mut local) = (0, vec![0; subject.cluster.nodes()], 0);
        for rank in 0..subject.cluster.size() {
            for written in group.written(rank, &subject.call).ok()? {
                let away = written.readers.iter().filter(|&&reader| node_of[reader] != node_of[rank]).count();
                messages += away as u64 * written.messages;
                bytes[node_of[rank]] += away as u64 * written.bytes;
                local += if away < written.readers.len() { written.messages } else { 0 };
            }
        }
        Some((messages, bytes, local))
    }

    fn holds(subject: &Subject<'_>, replayed: &mut usize) {
        let job = subject.job();
        let Choice { algorithm, segment, .. } = job.decision.choice;
        let depth = job.decision.choice.window();
        let described = subject.group().path("shm", &subject.call);
        let name = variant_name((algorithm, job.decision.format));
        let says = match job.decision.inline {
            true => "shm publish, one message".to_owned(),
            false => {
                format!("shm {name}, segments of {} KiB, {depth} cells", segment.div_ceil(1024))
            }
        };
        let instead = match job.decision.reason {
            Reason::Unsupported(wanted) => format!(" ({} does not support this call)", wanted.name()),
            _ => String::new(),
        };
        assert_eq!(described, says + &instead);
        if subject.cluster.size() > 40 || job.messages(subject.cluster) > 4_000 {
            return;
        }
        let Some((messages, bytes, local)) = bound(subject) else { return };
        let run = job.run(subject.cluster, Vec::new()).unwrap();
        let context = format!("{:?} {:?} {:?}", subject.call, subject.cluster.ranks, job.decision.choice);
        assert_eq!(run.outcome.network_messages, messages, "{context}");
        for (replayed, bound) in run.outcome.out_bytes.iter().zip(bytes) {
            // The replay counts the scales of a message as if its blocks were one.
            let scales = if job.decision.format == Some(Format::Int8) { bound / 100 } else { 0 };
            assert!(replayed.abs_diff(bound) <= scales, "{replayed} instead of {bound} bytes, {context}");
        }
        assert_eq!(run.outcome.local_messages, local, "{context}");
        *replayed += 1;
    }

    /// Choice, blocks, segments: whoever tells or simulates a plan has the one that the engine binds, message by message.
    #[test]
    fn what_is_told_and_simulated_is_what_the_engine_binds() {
        let mut chance = Chance(7);
        let mut replayed = 0;
        for _ in 0..2_500 {
            let (cluster, config) = (cluster(&mut chance), config(&mut chance));
            let collective = chance.of(&Collective::ALL);
            let root = if collective.has_root() { chance.below(cluster.size()) } else { 0 };
            // All magnitudes, whole or not; small ones leave blocks empty.
            let bytes = (1 << chance.below(25)) + chance.of(&[0, 0, 4, 68, 1_000]);
            let half = chance.below(4) == 0;
            holds(&Subject::under(config, &cluster, collective, bytes, root, half), &mut replayed);
        }
        assert!(replayed > 1_000, "{replayed}");
    }
}
