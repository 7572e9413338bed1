//! Logs of a rank's calls and messages in a group, compared between the ranks when they leave it.

use std::collections::VecDeque;

use smddp_base::CallFingerprint;

use crate::call::fingerprint::mix;

/// Log of the collectives that a rank called.
#[derive(Default)]
pub(crate) struct CallLog {
    /// Digest of all calls in their order: equal on ranks that made the same calls.
    pub(crate) digest: u64,
    pub(crate) calls: u64,
    /// The latest fingerprints, to find the call that differs.
    pub(crate) latest: VecDeque<CallFingerprint>,
}

pub(crate) const MAX_RECORDED: usize = 64;

impl CallLog {
    pub(crate) fn add(&mut self, fingerprint: CallFingerprint) {
        self.digest = mix(self.digest ^ fingerprint.call).wrapping_add(mix(fingerprint.count));
        self.calls += 1;
        if self.latest.len() == MAX_RECORDED {
            self.latest.pop_front();
        }
        self.latest.push_back(fingerprint);
    }
}

/// Log of the messages that a rank sent to each other rank, and of its recvs from each.
pub(crate) struct MessageLog {
    me: usize,
    /// Sum of message hashes, sends added and recvs subtracted. Over all ranks it is 0 if each message has a sender
    /// and a receiver.
    pub(crate) balance: u64,
    /// Per rank: messages sent to it, recvs from it.
    pub(crate) counts: Vec<(u32, u32)>,
}

impl MessageLog {
    pub(crate) fn new(me: usize, size: usize) -> Self {
        Self { me, balance: 0, counts: vec![(0, 0); size] }
    }

    fn name(from: usize, to: usize, tag: u64) -> u64 {
        mix(mix((from as u64) << 32 | to as u64) ^ tag)
    }

    /// Counts a send. `times`: 1, or -1 for a send that failed.
    pub(crate) fn sent(&mut self, to: usize, tag: u64, times: i32) {
        self.counts[to].0 = self.counts[to].0.wrapping_add_signed(times);
        self.balance = self.balance.wrapping_add(Self::name(self.me, to, tag).wrapping_mul(times as u64));
    }

    /// Returns the ranks to which this rank has sent messages.
    pub(crate) fn receivers(&self) -> Vec<usize> {
        self.counts.iter().enumerate().filter(|(_, (sent, _))| *sent > 0).map(|(rank, _)| rank).collect()
    }

    pub(crate) fn requested(&mut self, from: usize, tag: u64, times: i32) {
        self.counts[from].1 = self.counts[from].1.wrapping_add_signed(times);
        self.balance = self.balance.wrapping_sub(Self::name(from, self.me, tag).wrapping_mul(times as u64));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn balance_is_zero_only_if_every_message_has_a_recv() {
        let sum = |of: [&MessageLog; 2]| of[0].balance.wrapping_add(of[1].balance);
        let (mut a, mut b) = (MessageLog::new(0, 2), MessageLog::new(1, 2));
        a.sent(1, 7, 1);
        assert_ne!(sum([&a, &b]), 0);
        b.requested(0, 8, 1);
        assert_ne!(sum([&a, &b]), 0, "another tag is another message");
        b.requested(0, 8, -1);
        b.requested(0, 7, 1);
        assert_eq!(sum([&a, &b]), 0);
        b.sent(0, 7, 1);
        b.sent(0, 7, -1);
        assert_eq!(sum([&a, &b]), 0, "a failed send does not count");
        assert_eq!((a.counts[1], b.counts[0]), ((1, 0), (0, 1)));
    }

    #[test]
    fn digest_depends_on_the_order_of_calls() {
        let fingerprints = [CallFingerprint { call: 1, count: 2 }, CallFingerprint { call: 2, count: 1 }];
        let of = |fingerprints: &[CallFingerprint]| {
            let mut call_log = CallLog::default();
            fingerprints.iter().for_each(|&fingerprint| call_log.add(fingerprint));
            call_log.digest
        };
        assert_ne!(of(&fingerprints), of(&[fingerprints[1], fingerprints[0]]));
        assert_ne!(of(&fingerprints), of(&fingerprints[..1]));
        assert_eq!(of(&fingerprints), of(&fingerprints));
    }
}
