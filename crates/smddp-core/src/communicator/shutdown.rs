//! Checked shutdown of a group.
//!
//! Most mismatched calls fail while they run. Some complete unnoticed, for example with a root that receives no
//! data, or a message without a recv. So the ranks compare their calls as the last operation of a group: a small
//! all_reduce, and if its sum is wrong, an all_gather that finds the difference.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use smddp_base::{CallFingerprint, Mismatch};
use smddp_plan::{Collective, Counts};

use crate::call::fingerprint::{self, mix};
use crate::call::types::{DType, RedOp};
use crate::call::{Blocks, Call};
use crate::engine::Engine;
use crate::engine::shared::SharedState;
use crate::error::{Error, Result};
use crate::failure::call_log::MAX_RECORDED;
use crate::failure::error_text;
use crate::failure::names::GroupNames;
use crate::log::{self, Level};
use crate::sync::completion::Completion;
use crate::sync::lock;

/// Largest group whose ranks exchange message counts per pair. In larger groups the error only states that messages
/// are left over.
const MAX_PAIR_COUNT_RANKS: usize = 1024;
/// Maximum number of rank pairs with unreceived messages that an error lists.
const MAX_LISTED_PAIRS: usize = 8;

/// Encodes this rank's calls: their number, the newest fingerprints and the message counts.
fn call_record(engine: &Engine, size: usize) -> Vec<u64> {
    let call_log = &engine.call_log;
    let mut words = vec![call_log.calls];
    words.extend(call_log.latest.iter().flat_map(|fingerprint| [fingerprint.call, fingerprint.count]));
    words.resize(1 + 2 * MAX_RECORDED, 0);
    if size <= MAX_PAIR_COUNT_RANKS {
        words.extend(
            engine
                .messages
                .message_log
                .counts
                .iter()
                .map(|&(sent, requested)| u64::from(sent) << 32 | u64::from(requested)),
        );
    }
    words
}

/// Returns the first difference between the calls of all ranks. `None` if some ranks only await messages that were
/// not sent: these recvs end with the group and report it.
fn first_difference(group: &GroupNames, call_records: &[u64], size: usize) -> Option<Error> {
    let each = call_records.len() / size;
    let call_record = |rank: usize| &call_records[rank * each..(rank + 1) * each];
    let me = group.me;
    let calls = call_record(me)[0];
    let first = calls.saturating_sub(MAX_RECORDED as u64);
    for (index, seq) in (first..calls).enumerate() {
        let fingerprint = |rank: usize| CallFingerprint {
            call: call_record(rank)[1 + 2 * index],
            count: call_record(rank)[2 + 2 * index],
        };
        let mine = fingerprint(me);
        if let Some(rank) = (0..size).find(|&rank| fingerprint(rank) != mine) {
            let collective = fingerprint::collective(mine).unwrap_or(Collective::Barrier);
            let found = Mismatch { rank, theirs: fingerprint(rank), bytes: None };
            return Some(error_text::mismatch(group, collective, seq, mine, found));
        }
    }
    let counts =
        |rank: usize, peer: usize| call_record(rank).get(1 + 2 * MAX_RECORDED + peer).copied().unwrap_or(0);
    let pairs = (0..size).flat_map(|from| (0..size).map(move |to| (from, to)));
    let pairs = pairs.map(|(from, to)| (from, to, counts(from, to) >> 32, counts(to, from) & 0xffff_ffff));
    let (mut unreceived, mut has_unanswered) = (Vec::new(), false);
    for pair @ (_, _, sent, requested) in pairs {
        has_unanswered |= sent < requested;
        if sent > requested {
            unreceived.push(pair);
        }
    }
    if unreceived.is_empty() && has_unanswered {
        return None;
    }
    let describe = |&(from, to, sent, requested): &(usize, usize, u64, u64)| {
        let (from, to) = (group.describe(from), group.describe(to));
        format!("{from} sent {sent} message(s) to {to}, which posted {requested} recv(s) from it")
    };
    let mut detail = unreceived.iter().take(MAX_LISTED_PAIRS).map(describe).collect::<Vec<_>>().join("; ");
    if unreceived.is_empty() {
        detail = format!(
            "the ranks made different calls before the last {MAX_RECORDED}, or not all messages were received"
        );
    } else if unreceived.len() > MAX_LISTED_PAIRS {
        detail += &format!("; and {} more pairs", unreceived.len() - MAX_LISTED_PAIRS);
    }
    let rank =
        unreceived.iter().flat_map(|&(from, to, ..)| [from, to]).find(|&rank| rank != me).unwrap_or(me);
    detail += "; every send needs its recv";
    Some(Error::Mismatch {
        operation: "destroy_process_group".to_owned(),
        group: group.group(),
        rank,
        detail,
    })
}

/// One collective of the shutdown, with its output.
struct Step {
    work: Arc<Completion>,
    output: SharedWords,
}

/// Memory that a call writes while it is in progress.
type SharedWords = Arc<[AtomicU64]>;

fn address(words: &SharedWords) -> *mut u8 {
    words.as_ptr().cast_mut().cast()
}

impl Step {
    fn output(&self) -> Vec<u64> {
        self.output.iter().map(|word| word.load(Ordering::Relaxed)).collect()
    }
}

impl SharedState {
    /// Deletes the record of this rank's claim. Called before the ranks leave together, because the process that
    /// serves the store may exit afterwards.
    ///
    /// # Errors
    /// [`Error::Interrupted`]. Any other error of the store is logged, since the record does no harm.
    pub(super) fn delete_claim(&self) -> Result<()> {
        let deletion = lock(&self.claim).as_mut().and_then(|(_, deletion)| deletion.take());
        if let Some(Err(error)) = deletion.map(|delete| delete()) {
            if error == Error::Interrupted {
                return Err(error);
            }
            let (rank, name) = (self.rank, &self.name);
            log::say(
                Level::Trace,
                &format!("group `{name}`: could not delete the claim of rank {rank} from the store: {error}"),
            );
        }
        Ok(())
    }

    /// Enqueues a collective of the shutdown after all other calls. Returns `None` if another thread waits in this
    /// group for a call that closing the group will end.
    fn leaving_step(
        self: &Arc<Self>,
        collective: Collective,
        encode: impl Fn(&Engine) -> Vec<u64>,
    ) -> Result<Option<Step>> {
        let Some(mut engine) = self.try_own_for() else { return Ok(None) };
        engine.take_commands();
        let input: SharedWords = encode(&engine).into_iter().map(AtomicU64::new).collect();
        let count = input.len();
        let (counts, output_count) = match collective {
            Collective::AllReduce => (Counts::Whole(count), count),
            _ => (Counts::Even(count), count * self.size),
        };
        let output: SharedWords = (0..output_count).map(|_| AtomicU64::new(0)).collect();
        let call = Call {
            collective,
            dtype: DType::U64,
            redop: RedOp::Sum,
            root: 0,
            input: Blocks::Flat { ptr: address(&input), count },
            output: Blocks::Flat { ptr: address(&output), count: output_count },
        };
        let mut op = self.prepare(engine.spare.take(), &call, counts, Duration::MAX, None)?;
        let mut bound = (*op.bound).clone();
        bound.fingerprint = fingerprint::leaving(bound.fingerprint);
        bound.routed = bound.routed.unannounced();
        op.bound = Arc::new(bound);
        let work = Arc::new(Completion::new(Some(Box::new((input, output.clone())))));
        op.work = Some(work.clone());
        engine.enqueue(op);
        Ok(Some(Step { work, output }))
    }

    /// Compares the calls of all ranks. `wait` waits for one collective within the time limit. Lost and late ranks
    /// cannot be compared; that is not an error. Returns true if all messages were sent and have a recv, so pending
    /// ones will arrive.
    ///
    /// # Errors
    /// [`Error::Mismatch`] if the calls differ.
    pub(crate) fn compare(self: &Arc<Self>, wait: impl Fn(&Completion) -> Result<()>) -> Result<bool> {
        let digest = std::cell::Cell::new(0);
        let first = self.leaving_step(Collective::AllReduce, |engine| {
            digest.set(mix(engine.call_log.digest ^ mix(engine.call_log.calls)));
            vec![digest.get(), engine.messages.message_log.balance]
        })?;
        let Some(step) = first else { return Ok(false) };
        wait(&step.work)?;
        let sums = step.output();
        // Digests are uniformly distributed, so different ones give this sum only by chance.
        if sums == [digest.get().wrapping_mul(self.size as u64), 0] {
            return Ok(true);
        }
        // All ranks get the same sum and reach this point.
        let Some(step) = self.leaving_step(Collective::AllGather, |engine| call_record(engine, self.size))?
        else {
            return Ok(false);
        };
        wait(&step.work)?;
        let Some(mut engine) = self.try_own_for() else { return Ok(false) };
        let Some(error) = first_difference(&engine.names, &step.output(), self.size) else {
            return Ok(false);
        };
        engine.fail_group(error.clone());
        Err(error)
    }

    /// Cancels the comparison if it is still pending.
    pub(crate) fn cancel_leaving(self: &Arc<Self>) {
        if let Some(mut engine) = self.try_own_for() {
            engine.end_leaving("the time limit of the shutdown has passed");
        }
    }
}
