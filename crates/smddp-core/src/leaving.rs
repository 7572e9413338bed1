//! Leaving a group together. Most calls that differ are found while they run; a root that reads from nobody, or a message
//! that nobody receives, may be over before. So the last thing that the ranks of a group do is to hold against each other
//! what they called: one small all_reduce, and where its sum is wrong, an all_gather that tells why.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use smddp_plan::{Collective, Counts};
use smddp_transport::{Group, Head, Mismatch};

use crate::call::{Blocks, Call};
use crate::comm::Inner;
use crate::describe;
use crate::driver::Driver;
use crate::error::{Error, Result};
use crate::head::{self, mix};
use crate::types::{DType, RedOp};
use crate::work::Shared;

/// The collectives that a rank called.
#[derive(Default)]
pub(crate) struct Record {
    /// Of all of them in their order: the same on ranks that made the same calls.
    digest: u64,
    calls: u64,
    /// The newest headers, to tell which call it was.
    newest: VecDeque<Head>,
}

const REMEMBERED: usize = 64;

impl Record {
    pub(crate) fn add(&mut self, head: Head) {
        self.digest = mix(self.digest ^ head.what).wrapping_add(mix(head.count));
        self.calls += 1;
        if self.newest.len() == REMEMBERED {
            self.newest.pop_front();
        }
        self.newest.push_back(head);
    }
}

/// The messages that a rank sent to each other one, and those that it asked for.
pub(crate) struct Ledger {
    me: usize,
    /// 0 in the sum over all ranks, where each message has a sender and a receiver.
    balance: u64,
    /// Per rank: sent to it, asked of it.
    counts: Vec<(u32, u32)>,
}

impl Ledger {
    pub(crate) fn new(me: usize, size: usize) -> Self {
        Self { me, balance: 0, counts: vec![(0, 0); size] }
    }

    fn name(from: usize, to: usize, tag: u64) -> u64 {
        mix(mix((from as u64) << 32 | to as u64) ^ tag)
    }

    /// `times`: 1, or -1 for one that came to nothing.
    pub(crate) fn sent(&mut self, to: usize, tag: u64, times: i32) {
        self.counts[to].0 = self.counts[to].0.wrapping_add_signed(times);
        self.balance = self.balance.wrapping_add(Self::name(self.me, to, tag).wrapping_mul(times as u64));
    }

    pub(crate) fn asked(&mut self, from: usize, tag: u64, times: i32) {
        self.counts[from].1 = self.counts[from].1.wrapping_add_signed(times);
        self.balance = self.balance.wrapping_sub(Self::name(from, self.me, tag).wrapping_mul(times as u64));
    }
}

/// Groups with more ranks are told that messages are left over, not whose.
const LISTED: usize = 1024;
/// Leftovers that an error lists.
const SHOWN: usize = 8;

/// Words of a rank's whole story: number of calls, newest headers, messages.
fn story(driver: &Driver, size: usize) -> Vec<u64> {
    let record = &driver.record;
    let mut words = vec![record.calls];
    words.extend(record.newest.iter().flat_map(|head| [head.what, head.count]));
    words.resize(1 + 2 * REMEMBERED, 0);
    if size <= LISTED {
        words.extend(
            driver.mail.ledger.counts.iter().map(|&(sent, asked)| u64::from(sent) << 32 | u64::from(asked)),
        );
    }
    words
}

/// What is wrong, from the stories of all ranks; nothing where some only asked for messages that nobody sent: such a recv
/// ends with the group, and says so itself.
fn verdict(link: &Group, group: &str, stories: &[u64], size: usize) -> Option<Error> {
    let each = stories.len() / size;
    let story = |rank: usize| &stories[rank * each..(rank + 1) * each];
    let me = link.rank();
    let calls = story(me)[0];
    let first = calls.saturating_sub(REMEMBERED as u64);
    for (index, seq) in (first..calls).enumerate() {
        let head = |rank: usize| Head { what: story(rank)[1 + 2 * index], count: story(rank)[2 + 2 * index] };
        let mine = head(me);
        if let Some(rank) = (0..size).find(|&rank| head(rank) != mine) {
            let collective = head::collective(mine).unwrap_or(Collective::Barrier);
            let found = Mismatch { rank, theirs: head(rank), bytes: None };
            return Some(describe::mismatch(link, group, collective, seq, mine, found));
        }
    }
    let told = |rank: usize, peer: usize| story(rank).get(1 + 2 * REMEMBERED + peer).copied().unwrap_or(0);
    let pairs = (0..size).flat_map(|from| (0..size).map(move |to| (from, to)));
    let pairs = pairs.map(|(from, to)| (from, to, told(from, to) >> 32, told(to, from) & 0xffff_ffff));
    let (mut left, mut unanswered) = (Vec::new(), false);
    for pair @ (_, _, sent, asked) in pairs {
        unanswered |= sent < asked;
        if sent > asked {
            left.push(pair);
        }
    }
    if left.is_empty() && unanswered {
        return None;
    }
    let describe = |&(from, to, sent, asked): &(usize, usize, u64, u64)| {
        let (from, to) = (link.describe(from), link.describe(to));
        format!("{from} sent {sent} message(s) to {to}, which asked for {asked}")
    };
    let mut detail = left.iter().take(SHOWN).map(describe).collect::<Vec<_>>().join("; ");
    if left.is_empty() {
        detail = format!(
            "the ranks made different calls before the last {REMEMBERED}, or not all messages were received"
        );
    } else if left.len() > SHOWN {
        detail += &format!("; and {} more pairs", left.len() - SHOWN);
    }
    let rank = left.iter().flat_map(|&(from, to, ..)| [from, to]).find(|&rank| rank != me).unwrap_or(me);
    detail += "; every send needs its recv";
    Some(Error::Mismatch { what: "destroy_process_group".to_owned(), group: group.to_owned(), rank, detail })
}

/// A step of leaving together: what each rank gives, and whether the ranks' words are added up or set in a row.
pub(crate) struct Step {
    pub(crate) work: Arc<Shared>,
    taken: Arc<Words>,
}

/// Memory that a call writes while it is under way.
struct Words(Vec<std::sync::atomic::AtomicU64>);

impl Words {
    fn new(words: &[u64]) -> Arc<Self> {
        Arc::new(Self(words.iter().map(|&word| word.into()).collect()))
    }

    fn address(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    fn read(&self) -> Vec<u64> {
        self.0.iter().map(|word| word.load(std::sync::atomic::Ordering::Relaxed)).collect()
    }
}

impl Inner {
    /// Puts a call behind all others by which this rank leaves; `None` where somebody else waits in this group for a
    /// call that its end is to end.
    fn leave_by(
        self: &Arc<Self>,
        collective: Collective,
        give: impl Fn(&Driver) -> Vec<u64>,
    ) -> Result<Option<Step>> {
        let Some(mut driver) = self.drive_soon() else { return Ok(None) };
        self.collect(&mut driver);
        let given = Words::new(&give(&driver));
        let count = given.0.len();
        let (counts, room) = match collective {
            Collective::AllReduce => (Counts::Whole(count), count),
            _ => (Counts::Even(count), count * self.size),
        };
        let taken = Words::new(&vec![0; room]);
        let call = Call {
            collective,
            dtype: DType::U64,
            redop: RedOp::Sum,
            root: 0,
            input: Blocks::Flat { ptr: given.address(), count },
            output: Blocks::Flat { ptr: taken.address(), count: room },
        };
        let mut op = self.prepare(driver.spare.take(), &call, counts, Duration::MAX, None)?;
        let mut bound = (*op.bound).clone();
        bound.head = head::leaving(bound.head);
        op.bound = Arc::new(bound);
        let work = Arc::new(Shared::new(Some(Box::new((given, taken.clone())))));
        op.work = Some(work.clone());
        driver.enqueue(op);
        self.leave(driver);
        Ok(Some(Step { work, taken }))
    }

    /// Holds against each other what the ranks called: `Mismatch` where they did not do the same. `wait` waits for a step,
    /// as long as there is time; a rank that is gone, or late, cannot be held against, which is no error.
    /// Whether all messages were sent and asked for: those under way are then sure to arrive.
    pub(crate) fn compare(self: &Arc<Self>, wait: impl Fn(&Step) -> Result<()>) -> Result<bool> {
        let own = std::cell::Cell::new(0);
        let first = self.leave_by(Collective::AllReduce, |driver| {
            own.set(mix(driver.record.digest ^ mix(driver.record.calls)));
            vec![own.get(), driver.mail.ledger.balance]
        })?;
        let Some(step) = first else { return Ok(false) };
        wait(&step)?;
        let sums = step.taken.read();
        // Sums of words that look like chance: of different ones it is this by chance only.
        if sums == [own.get().wrapping_mul(self.size as u64), 0] {
            return Ok(true);
        }
        // All ranks have come to this.
        let Some(step) = self.leave_by(Collective::AllGather, |driver| story(driver, self.size))? else {
            return Ok(false);
        };
        wait(&step)?;
        let Some(mut driver) = self.drive_soon() else { return Ok(false) };
        let Some(error) = verdict(&driver.link, &self.name, &step.taken.read(), self.size) else {
            return Ok(false);
        };
        self.die(&mut driver, error.clone());
        Err(error)
    }

    /// Nothing that is still under way has to be compared any more.
    pub(crate) fn forget_leaving(&self) {
        if let Some(mut driver) = self.drive_soon() {
            driver.leave_alone("its time to leave was over");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_balance_is_zero_only_if_each_message_was_sent_and_asked_for() {
        let sum = |of: [&Ledger; 2]| of[0].balance.wrapping_add(of[1].balance);
        let (mut a, mut b) = (Ledger::new(0, 2), Ledger::new(1, 2));
        a.sent(1, 7, 1);
        assert_ne!(sum([&a, &b]), 0);
        b.asked(0, 8, 1);
        assert_ne!(sum([&a, &b]), 0, "another tag is another message");
        b.asked(0, 8, -1);
        b.asked(0, 7, 1);
        assert_eq!(sum([&a, &b]), 0);
        b.sent(0, 7, 1);
        b.sent(0, 7, -1);
        assert_eq!(sum([&a, &b]), 0, "one that came to nothing does not count");
        assert_eq!((a.counts[1], b.counts[0]), ((1, 0), (0, 1)));
    }

    #[test]
    fn another_order_is_another_record() {
        let heads = [Head { what: 1, count: 2 }, Head { what: 2, count: 1 }];
        let of = |heads: &[Head]| {
            let mut record = Record::default();
            heads.iter().for_each(|&head| record.add(head));
            record.digest
        };
        assert_ne!(of(&heads), of(&[heads[1], heads[0]]));
        assert_ne!(of(&heads), of(&heads[..1]));
        assert_eq!(of(&heads), of(&heads));
    }
}
