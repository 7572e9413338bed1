//! SMDDP_AUDIT=wire: a message that changes between two nodes ends the group on all ranks, and the error names the link.
//! SMDDP_AUDIT=results: unchanged results pass the comparison, for all types, reductions and formats.

use smddp_core::{Blocks, Call, Collective, Communicator, DType, Error, Options, RedOp};

use crate::common::job::Job;
use crate::common::procs::{RankProcess, start};
use crate::common::{ALL, TIMEOUT, Wire, checked_links, over};
use crate::types::{REDOPS, defined};

/// A message inside a frame, messages of several segments, and messages that the receiver fetches over libfabric.
const COUNTS: [usize; 3] = [10, 5_000, 70_001];

#[test]
fn checked_frames_carry_every_collective() {
    for efa in [false, true] {
        over(checked_links(3, efa, None), TIMEOUT, |comm: &Communicator| {
            assert!(comm.transport().contains("with checksums"), "{}", comm.transport());
            for (salt, collective) in ALL.into_iter().enumerate() {
                for count in COUNTS {
                    let mut job = Job::new(comm.rank(), 3, collective, count, salt % 3, salt);
                    job.run(comm).unwrap();
                    job.check();
                }
            }
            comm.close();
        });
    }
}

#[test]
fn corrupted_message_ends_the_group_on_all_ranks_and_the_error_names_the_link() {
    for efa in [false, true] {
        for (size, sender, number, count) in
            [(2, 0, 1, 10), (3, 1, 2, 5_000), (3, 2, 3, 70_001), (2, 1, 5, 70_001)]
        {
            let context =
                format!("efa: {efa}, {size} ranks, message {number} of rank {sender}, {count} elements");
            let links = checked_links(size, efa, Some((sender, number)));
            over(links, TIMEOUT, |comm: &Communicator| {
                let run = |iteration: usize| {
                    let mut job = Job::new(comm.rank(), size, Collective::AllReduce, count, 0, iteration);
                    // The data of a call that succeeds are right.
                    job.run(comm).map(|()| job.check()).err()
                };
                let error = (0..20).find_map(run).expect(&context);
                let text = error.to_string();
                let Error::Corrupted { ranks, .. } = &error else { panic!("{context}: {text}") };
                assert_eq!(ranks, &[sender], "{context}: {text}");
                for part in ["all_reduce #", "group `test`", "CRC32C", "bytes", "check the memory", "message"]
                {
                    assert!(text.contains(part), "{context}: {text}");
                }
                let is_link = |receiver: usize| {
                    let link = |rank: usize| format!("rank {rank} (host ");
                    let mut parts = text.split(" was corrupted").next().unwrap_or_default().split(" to ");
                    let sends = parts.next().is_some_and(|part| part.contains(&link(sender)));
                    sends && parts.next().is_some_and(|part| part.starts_with(&link(receiver)))
                };
                assert!(
                    (0..size).any(|receiver| receiver != sender && is_link(receiver)),
                    "{context}: {text}"
                );
                let path = if efa { "over fabric efa" } else { "over tcp lo" };
                assert!(text.contains(path), "{context}: {text}");
                comm.close();
            });
        }
    }
}

/// Returns random bits, which contain all kinds of numbers. A bool is 0 or 1.
fn bits(dtype: DType, rank: usize, count: usize) -> Vec<u8> {
    let mut state = (rank as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    (0..count * dtype.size()).map(|_| if dtype == DType::Bool { byte() & 1 } else { byte() }).collect()
}

fn all_reduce(comm: &Communicator, dtype: DType, redop: RedOp, count: usize) {
    let mut data = bits(dtype, comm.rank(), count);
    let buffer = Blocks::Flat { ptr: data.as_mut_ptr(), count };
    let call =
        Call { collective: Collective::AllReduce, dtype, redop, root: 0, input: buffer, output: buffer };
    // SAFETY: the buffer outlives the synchronous call.
    let outcome = unsafe { comm.run(&call, Options::default()) };
    assert!(outcome.is_ok(), "{dtype:?} {redop:?}, {count} elements: {outcome:?}");
}

/// Runs all ranks as threads in this process, which has the settings in its environment.
pub(crate) fn rank(me: &RankProcess) {
    let has_format = std::env::var("SMDDP_WIRE_FORMAT").is_ok_and(|format| !format.is_empty());
    for wire in [Wire::Shm, Wire::Nodes(1), Wire::Nodes(2), Wire::Efa(7)] {
        over(wire.links(5), TIMEOUT, |comm: &Communicator| {
            // A format applies to 32-bit floats only.
            let types = if has_format { &[DType::F32][..] } else { &DType::ALL };
            let mut calls = 0;
            for &dtype in types {
                for redop in REDOPS.into_iter().filter(|&redop| defined(dtype, redop)) {
                    for count in [9, 3_000] {
                        all_reduce(comm, dtype, redop, count);
                        calls += 1;
                    }
                }
            }
            for count in [16_386, 70_001] {
                all_reduce(comm, DType::F32, RedOp::Sum, count);
                calls += 1;
            }
            let gathers = comm
                .path_counters()
                .into_iter()
                .filter(|counters| counters.collective == Collective::AllGather);
            let compared: u64 = gathers.map(|counters| counters.operations).sum();
            assert_eq!(compared, calls, "comparisons over {wire:?}");
            comm.close();
        });
    }
    me.report("done");
}

#[test]
fn equal_results_of_all_types_reductions_and_formats_pass_the_comparison() {
    for (format, algorithm) in [("", ""), ("int8", ""), ("bf16", "hier-ring")] {
        let environment =
            [("SMDDP_AUDIT", "results:1"), ("SMDDP_WIRE_FORMAT", format), ("SMDDP_ALGO", algorithm)];
        let mut ranks = start("audit", 1, &environment, 4 * TIMEOUT);
        ranks.wait_for(0, "done");
        ranks.finish([0]);
    }
}
