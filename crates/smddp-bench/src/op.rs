//! The collectives: names, and the buffer sizes and bandwidths of nccl-tests.

use std::str::FromStr;

use smddp_core::{Collective, name_of};

/// An operation to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    AllGather,
    ReduceScatter,
    AllReduce,
    Broadcast,
    Reduce,
    Gather,
    Scatter,
    AllToAll,
    Barrier,
    /// Every rank sends to the next and receives from the previous rank.
    SendRecv,
    /// An all_gather in log2(ranks) exchanges.
    Hypercube,
    /// all_to_all with blocks of different sizes.
    AllToAllV,
}

/// Elements of one case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Elements {
    /// The count of the call (nccl-tests' column `count`).
    pub count: usize,
    /// Elements of the input of a sending rank.
    pub send: usize,
    /// Elements of the output of a receiving rank.
    pub receive: usize,
}

impl Op {
    pub(crate) const ALL: [Op; 12] = [
        Op::AllGather,
        Op::ReduceScatter,
        Op::AllReduce,
        Op::Broadcast,
        Op::Reduce,
        Op::Gather,
        Op::Scatter,
        Op::AllToAll,
        Op::Barrier,
        Op::SendRecv,
        Op::Hypercube,
        Op::AllToAllV,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::Hypercube => "hypercube",
            Op::AllToAllV => "alltoallv",
            _ => self.collective().map_or("sendrecv", name_of),
        }
    }

    /// Returns the name of the corresponding program of nccl-tests. For barrier it is the name by the same scheme.
    pub(crate) fn program(self) -> String {
        format!("{}_perf", self.name().replace("all_to_all", "alltoall"))
    }

    pub(crate) fn collective(self) -> Option<Collective> {
        // The collectives are first, in the same order.
        Collective::ALL.get(self as usize).copied()
    }

    pub(crate) fn reduces(self) -> bool {
        self.collective().is_some_and(Collective::reduces)
    }

    pub(crate) fn has_root(self) -> bool {
        self.collective().is_some_and(Collective::has_root)
    }

    /// Returns true if input and output may share memory. Otherwise the second half of a row repeats the first.
    pub(crate) const fn has_in_place(self) -> bool {
        !matches!(self, Op::AllToAll | Op::AllToAllV | Op::SendRecv | Op::Barrier)
    }

    /// Returns true if `rank` has an input.
    pub(crate) const fn sends(self, rank: usize, root: usize) -> bool {
        match self {
            Op::Broadcast | Op::Scatter => rank == root,
            Op::Barrier => false,
            _ => true,
        }
    }

    /// Returns true if `rank` has an output.
    pub(crate) const fn receives(self, rank: usize, root: usize) -> bool {
        match self {
            Op::Reduce | Op::Gather => rank == root,
            Op::Barrier => false,
            _ => true,
        }
    }

    /// Divides `elements`, the whole gathered, reduced or exchanged buffer, among `ranks` ranks. Blocks are not rounded to 16
    /// bytes as in the newest nccl-tests, so that the smallest sizes can be measured.
    pub(crate) const fn shape(self, elements: usize, ranks: usize) -> Elements {
        let block = elements / ranks;
        match self {
            Op::AllGather | Op::Gather | Op::Hypercube => {
                Elements { count: block, send: block, receive: block * ranks }
            }
            Op::ReduceScatter | Op::Scatter => Elements { count: block, send: block * ranks, receive: block },
            Op::AllToAll | Op::AllToAllV => {
                Elements { count: block, send: block * ranks, receive: block * ranks }
            }
            Op::AllReduce | Op::Broadcast | Op::Reduce | Op::SendRecv => {
                Elements { count: elements, send: elements, receive: elements }
            }
            Op::Barrier => Elements { count: 0, send: 0, receive: 0 },
        }
    }

    /// Returns busbw / algbw.
    pub(crate) fn bus_factor(self, ranks: usize) -> f64 {
        let n = ranks as f64;
        match self {
            Op::AllReduce => 2.0 * (n - 1.0) / n,
            Op::AllGather | Op::ReduceScatter | Op::Gather | Op::Scatter | Op::AllToAll | Op::AllToAllV => {
                (n - 1.0) / n
            }
            Op::Broadcast | Op::Reduce | Op::SendRecv | Op::Hypercube | Op::Barrier => 1.0,
        }
    }

    /// Returns (algbw, busbw) in GB/s of a call that took `seconds`.
    pub(crate) fn bandwidth(self, shape: Elements, element: usize, ranks: usize, seconds: f64) -> (f64, f64) {
        let elements = match self {
            // Without the rank's own block. Therefore the bus factor is 1.
            Op::Hypercube => shape.count * (ranks - 1),
            _ => shape.send.max(shape.receive),
        };
        let bytes = (elements * element) as f64;
        let algbw = if bytes == 0.0 { 0.0 } else { bytes / 1e9 / seconds };
        (algbw, algbw * self.bus_factor(ranks))
    }
}

/// Returns the elements of each block that `rank` of `ranks` sends in alltoallv, `total` in all. It receives as many from each
/// rank. The size of a block is proportional to the sum of both ranks modulo `ranks`, up to twice the average. The block with
/// sum 0 gets the remainder.
pub(crate) fn uneven(total: usize, ranks: usize, rank: usize) -> Vec<usize> {
    let step = 2 * total / (ranks * ranks);
    let left = total - step * (ranks * (ranks - 1) / 2);
    let block = |peer: usize| match (rank + peer) % ranks {
        0 => left,
        k => k * step,
    };
    (0..ranks).map(block).collect()
}

impl FromStr for Op {
    type Err = String;

    /// Parses smddp's names, with or without hyphens, and the names of nccl-tests' programs.
    fn from_str(text: &str) -> Result<Op, String> {
        let plain = |s: &str| s.to_ascii_lowercase().replace(['_', '-'], "");
        let wanted = plain(text);
        let wanted = wanted.strip_suffix("perf").unwrap_or(&wanted);
        Op::ALL.into_iter().find(|op| plain(op.name()) == wanted).ok_or_else(|| {
            format!("invalid collective '{text}': expected one of {}", Op::ALL.map(Op::name).join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_spellings_are_accepted() {
        for (text, op) in [
            ("all_gather", Op::AllGather),
            ("all-gather", Op::AllGather),
            ("allgather", Op::AllGather),
            ("all_gather_perf", Op::AllGather),
            ("alltoall_perf", Op::AllToAll),
            ("alltoall", Op::AllToAll),
            ("alltoallv_perf", Op::AllToAllV),
            ("all_to_all_v", Op::AllToAllV),
            ("sendrecv_perf", Op::SendRecv),
            ("send_recv", Op::SendRecv),
            ("Reduce-Scatter", Op::ReduceScatter),
            ("hypercube_perf", Op::Hypercube),
        ] {
            assert_eq!(text.parse(), Ok(op));
        }
        assert!("all_gathers".parse::<Op>().is_err());
    }

    #[test]
    fn operations_map_to_collectives_and_programs() {
        assert_eq!(Op::AllGather.collective(), Some(Collective::AllGather));
        assert_eq!(Op::AllToAll.collective(), Some(Collective::AllToAll));
        assert_eq!(Op::Barrier.collective(), Some(Collective::Barrier));
        assert_eq!((Op::SendRecv.collective(), Op::SendRecv.program()), (None, "sendrecv_perf".to_owned()));
        assert_eq!(
            (Op::Hypercube.collective(), Op::Hypercube.program()),
            (None, "hypercube_perf".to_owned())
        );
        assert_eq!(Op::AllToAll.program(), "alltoall_perf");
        assert!(Op::ALL.into_iter().filter_map(Op::collective).eq(Collective::ALL));
    }

    #[test]
    fn uneven_blocks_match_between_ranks_and_have_the_total_size() {
        for ranks in [1, 2, 3, 4, 7] {
            for total in [0, ranks, 5 * ranks, 1000 * ranks] {
                let all: Vec<Vec<usize>> = (0..ranks).map(|rank| uneven(total, ranks, rank)).collect();
                for (rank, blocks) in all.iter().enumerate() {
                    assert_eq!(blocks.iter().sum::<usize>(), total);
                    assert!((0..ranks).all(|peer| all[peer][rank] == blocks[peer]), "{ranks} {total}");
                }
            }
        }
        assert_eq!(uneven(800, 4, 0), [200, 100, 200, 300]);
        assert_eq!(uneven(800, 4, 3), [300, 200, 100, 200]);
    }

    #[test]
    fn size_is_the_whole_buffer() {
        assert_eq!(Op::AllGather.shape(17, 3), Elements { count: 5, send: 5, receive: 15 });
        assert_eq!(Op::ReduceScatter.shape(17, 3), Elements { count: 5, send: 15, receive: 5 });
        assert_eq!(Op::AllReduce.shape(17, 3), Elements { count: 17, send: 17, receive: 17 });
        assert_eq!(Op::AllToAll.shape(2, 3), Elements { count: 0, send: 0, receive: 0 });
    }

    #[test]
    fn bandwidth_follows_nccl_tests() {
        let of = |op: Op| {
            let (alg, bus) = op.bandwidth(op.shape(4000, 4), 4, 4, 1e-6);
            ((alg * 100.0).round() / 100.0, (bus * 100.0).round() / 100.0)
        };
        assert_eq!(of(Op::AllGather), (16.0, 12.0));
        assert_eq!(of(Op::ReduceScatter), (16.0, 12.0));
        assert_eq!(of(Op::AllReduce), (16.0, 24.0));
        assert_eq!(of(Op::AllToAll), (16.0, 12.0));
        assert_eq!(of(Op::AllToAllV), (16.0, 12.0));
        assert_eq!(of(Op::Gather), (16.0, 12.0));
        assert_eq!(of(Op::Broadcast), (16.0, 16.0));
        assert_eq!(of(Op::SendRecv), (16.0, 16.0));
        assert_eq!(of(Op::Hypercube), (12.0, 12.0));
        assert_eq!(Op::Barrier.bandwidth(Op::Barrier.shape(0, 4), 4, 4, 1e-6), (0.0, 0.0));
    }
}
