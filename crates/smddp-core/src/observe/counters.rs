//! Counters of operations and bytes, by collective, algorithm and wire format.

use std::sync::atomic::{AtomicU64, Ordering};

use smddp_plan::format::AlgorithmVariant;
use smddp_plan::{Algorithm, Collective, Format};

/// Counters of one collective with one algorithm and wire format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counters {
    /// Collective.
    pub collective: Collective,
    /// Algorithm and wire format.
    pub variant: AlgorithmVariant,
    /// Number of operations.
    pub operations: u64,
    /// Bytes of the whole buffers.
    pub bytes: u64,
    /// Bytes that this rank sent to ranks of other nodes, as on the wire: compressed or not.
    pub internode_bytes: u64,
}

/// Operations, bytes and bytes between nodes, by wire format (uncompressed first).
type Counts = [[AtomicU64; 3]; Format::ALL.len() + 1];

/// Counters by collective and algorithm. Only the engine writes them; any thread may read.
#[derive(Default)]
pub(crate) struct PathCounters([[Counts; Algorithm::ALL.len()]; Collective::ALL.len()]);

impl PathCounters {
    /// A load and a store suffice, since only the engine calls this.
    pub(crate) fn add(
        &self,
        collective: Collective,
        (algorithm, format): AlgorithmVariant,
        bytes: u64,
        internode_bytes: u64,
    ) {
        let row = format.map_or(0, |format| format as usize + 1);
        let counts = &self.0[collective as usize][algorithm as usize][row];
        for (count, more) in counts.iter().zip([1, bytes, internode_bytes]) {
            count.store(count.load(Ordering::Relaxed) + more, Ordering::Relaxed);
        }
    }

    pub(crate) fn nonzero(&self) -> impl Iterator<Item = Counters> {
        let formats = || std::iter::once(None).chain(Format::ALL.map(Some));
        let paths = Collective::ALL
            .into_iter()
            .flat_map(|c| Algorithm::ALL.map(|a| (c, a)))
            .flat_map(move |(c, a)| formats().enumerate().map(move |(row, format)| (c, a, row, format)));
        let all = paths.map(|(c, a, row, format)| {
            let counts = self.0[c as usize][a as usize][row].each_ref();
            let [operations, bytes, internode_bytes] = counts.map(|count| count.load(Ordering::Relaxed));
            Counters { collective: c, variant: (a, format), operations, bytes, internode_bytes }
        });
        all.filter(|counters| counters.operations > 0)
    }
}
