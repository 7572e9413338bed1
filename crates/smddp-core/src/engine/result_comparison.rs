//! Comparison of results (`SMDDP_AUDIT=results`). After every n-th all_reduce the ranks gather a digest of its output.
//!
//! All ranks of a checked plan get equal bits, so different digests mean corrupted data. The gather follows the call in
//! the queue of each rank, and the ranks count the same calls, so it has the same sequence number on all of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use smddp_plan::{Buffer, Collective, Counts};

use super::Engine;
use super::audit::{Audit, AuditPlan, Comparison, digest};
use super::operation::Operation;
use super::shared::SharedState;
use crate::call::types::{DType, RedOp};
use crate::call::{Blocks, Call};
use crate::error::Result;
use crate::exec::host;
use crate::exec::walk::PipelineCursor;
use crate::sync::completion::Completion;

impl SharedState {
    /// Returns the part of a call in the comparison of results, if it has one. Results in device memory are not
    /// compared.
    pub(super) fn audit_of(&self, collective: Collective, on_device: bool) -> Result<Option<Audit>> {
        let Some(interval) = self.config.audit.results else { return Ok(None) };
        if collective != Collective::AllReduce || on_device || self.size == 1 {
            return Ok(None);
        }
        if let Some(plan) = self.audit_plan.get() {
            return Ok(Some(Audit::Compared(plan.clone())));
        }
        let mut words = vec![0u64; 1 + self.size];
        let (input, output) = words.split_at_mut(1);
        let flat = |words: &mut [u64]| Blocks::Flat { ptr: words.as_mut_ptr().cast(), count: words.len() };
        let call = Call {
            collective: Collective::AllGather,
            dtype: DType::U64,
            redop: RedOp::Sum,
            root: 0,
            input: flat(input),
            output: flat(output),
        };
        let prepared = self.prepare(None, &call, Counts::Even(1), Duration::MAX, None)?;
        let suspects = match (self.config.audit.wire, self.network_path.is_empty()) {
            (false, false) => "the network, a reduction, or the memory of the named ranks",
            _ => "a reduction, or the memory of the named ranks,",
        };
        let plan = AuditPlan { interval: interval.get(), bound: prepared.bound.clone(), suspects };
        Ok(Some(Audit::Compared(self.audit_plan.get_or_init(|| Arc::new(plan)).clone())))
    }
}

impl Engine {
    /// Returns the comparison that follows this operation, if one is due.
    pub(super) fn due_comparison(&mut self, op: &Operation) -> Option<Box<Operation>> {
        let Some(Audit::Compared(plan)) = &op.audit else { return None };
        if op.is_leaving() {
            return None;
        }
        self.audited += 1;
        self.audited.is_multiple_of(plan.interval).then(|| comparison(op, plan, self.names.size()))
    }

    /// Records the digest of a completed result for its comparison, or evaluates a completed comparison.
    #[inline(never)]
    pub(super) fn audit_completed(&mut self, op: &mut Operation) -> Result<()> {
        match &op.audit {
            Some(Audit::Comparison(comparison)) => comparison.outcome(&self.names),
            Some(Audit::Compared(_)) => {
                let next = self.queue.front().and_then(|next| next.audit.as_ref());
                if let Some(Audit::Comparison(comparison)) = next
                    && comparison.seq == op.seq
                {
                    #[cfg(test)]
                    if let Some(bit) = self.flipped_bit.take() {
                        host::flip_output_bit(&op.bound, &op.execution, bit);
                    }
                    let digest = digest(host::flat_output(&op.bound, &op.execution));
                    comparison.words[0].store(digest, Ordering::Relaxed);
                }
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Returns the completion of the comparison of collective `seq`, if that is compared.
    pub(crate) fn comparison_of(&mut self, seq: u64) -> Option<Arc<Completion>> {
        let compares = |op: &Operation| matches!(&op.audit, Some(Audit::Comparison(of)) if of.seq == seq);
        let next = self.queue.iter().find(|op| compares(op))?.seq;
        self.work_of(next)
    }
}

/// Returns the operation that compares the result of `op`.
fn comparison(op: &Operation, plan: &AuditPlan, size: usize) -> Box<Operation> {
    let words: Arc<[AtomicU64]> = (0..=size).map(|_| AtomicU64::new(0)).collect();
    let mut comparison = Operation::new(plan.bound.clone());
    comparison.collective = Collective::AllGather;
    comparison.timeout = op.timeout;
    comparison.scratch.resize(plan.bound.scratch.div_ceil(size_of::<u128>()), 0);
    let execution = &mut comparison.execution;
    execution.dtype = DType::U64;
    execution.bases[Buffer::In as usize] = words[0].as_ptr().expose_provenance();
    execution.bases[Buffer::Out as usize] = words[1].as_ptr().expose_provenance();
    execution.bases[Buffer::Scratch as usize] = comparison.scratch.as_ptr() as usize;
    execution.pipelines.resize(plan.bound.pipelines.len(), PipelineCursor::default());
    let (collective, seq, suspects) = (op.collective, op.seq, plan.suspects);
    comparison.audit = Some(Audit::Comparison(Comparison { collective, seq, suspects, words }));
    Box::new(comparison)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::for_tests::groups;
    use crate::{Communicator, Error, Options};

    /// Runs all_reduce calls on `size` ranks. A bit of the result of rank 1 flips before the digest of call `flip`.
    /// Returns the number of successful calls and the error, by rank.
    fn run(
        size: usize,
        audit: &'static str,
        calls: u64,
        flip: Option<u64>,
        is_async: bool,
    ) -> Vec<(u64, Option<Error>)> {
        let config = Config::read(|name| (name == "SMDDP_AUDIT").then(|| audit.to_owned())).unwrap();
        let config: &'static Config = Box::leak(Box::new(config));
        let groups = groups(size);
        std::thread::scope(|scope| {
            let start = |group| {
                scope.spawn(move || {
                    let timeout = Duration::from_secs(60);
                    let comm = Communicator::with_config(group, &vec![0; size], "test", timeout, config);
                    let mut error = None;
                    let mut ended = 0;
                    while ended < calls && error.is_none() {
                        if comm.rank() == 1 && flip == Some(ended) {
                            comm.state().own().flipped_bit = Some(77);
                        }
                        // Calls of different sizes: inside a header, and in segments.
                        let mut data = vec![1.5f32; if ended % 2 == 0 { 100 } else { 70_000 }];
                        let buffer = Blocks::Flat { ptr: data.as_mut_ptr().cast(), count: data.len() };
                        let (collective, dtype, redop) = (Collective::AllReduce, DType::F32, RedOp::Sum);
                        let call = Call { collective, dtype, redop, root: 0, input: buffer, output: buffer };
                        // SAFETY: the data outlives the call, which this thread waits for.
                        let outcome = unsafe {
                            match is_async {
                                true => {
                                    comm.start(&call, Options::default()).and_then(|work| work.wait(None))
                                }
                                false => comm.run(&call, Options::default()),
                            }
                        };
                        error = outcome.err();
                        ended += u64::from(error.is_none());
                    }
                    comm.close();
                    (ended, error)
                })
            };
            let ranks: Vec<_> = groups.into_iter().map(start).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn flipped_result_ends_the_compared_call_on_all_ranks_and_names_the_rank() {
        for (interval, audit) in [(1, "results:1"), (2, "results:2"), (5, "results:5")] {
            let flip = interval * 2 - 1;
            for (ended, error) in run(3, audit, 20, Some(flip), false) {
                let text = error.as_ref().map(ToString::to_string).unwrap_or_default();
                let Some(Error::Corrupted { ranks, .. }) = error else { panic!("{audit}: {text}") };
                assert_eq!((ended, ranks), (flip, vec![1]), "{audit}: {text}");
                for part in
                    ["all_reduce #", "group `test`", "rank 1 (host", "the other 2 ranks", "a reduction"]
                {
                    assert!(text.contains(part), "{audit}: {text}");
                }
                assert!(!text.contains("network,"), "one node: {text}");
            }
        }
    }

    #[test]
    fn flipped_result_of_an_asynchronous_call_ends_the_group() {
        for (ended, error) in run(2, "results:4", 400, Some(7), true) {
            let Some(Error::Corrupted { ranks, .. }) = &error else { panic!("{error:?}") };
            // The call itself may succeed, and few later ones.
            assert!((7..400).contains(&ended), "{ended}");
            assert_eq!(ranks, &[0, 1], "two ranks have no majority");
        }
    }

    #[test]
    fn a_result_between_two_comparisons_is_not_compared() {
        // The flip stays pending until the next comparison, which is the tenth call.
        for (ended, error) in run(3, "results:10", 9, Some(2), false) {
            assert_eq!((ended, error), (9, None));
        }
    }

    #[test]
    fn equal_results_pass() {
        for is_async in [false, true] {
            for audit in ["", "results:1", "wire,results:3"] {
                for (ended, error) in run(3, audit, 30, None, is_async) {
                    assert_eq!((ended, error), (30, None), "{audit}");
                }
            }
        }
    }
}
