//! Rounds in which every rank sends to the rank a fixed distance to its right: what `recursive` and `log` share.
//!
//! Blocks are counted from the rank itself: position `i` of rank `r` is block `r + i mod N`. A run of positions is
//! at most two runs of blocks (it may wrap), and each is a message of its own on a channel of its own. The
//! receiver sees the same blocks in the same two runs.

use super::Draft;
use crate::ir::{Ask, Buffer, Source, Span, Step};

/// One round: positions `first..first + count` of `buffer` go to the rank `distance` to the right.
pub(super) struct Round {
    pub(super) buffer: Buffer,
    pub(super) first: usize,
    pub(super) count: usize,
    pub(super) distance: usize,
}

impl Round {
    /// The messages of `writer`. In Scratch position `i` of rank `r` is block `r + i`, which never wraps; a
    /// round without blocks is a token.
    fn messages(&self, writer: usize, size: usize) -> Vec<Span> {
        if self.count == 0 {
            return vec![Span::TOKEN];
        }
        if self.buffer == Buffer::Scratch {
            return vec![Span::new(Buffer::Scratch, writer + self.first, self.count)];
        }
        let start = (writer + self.first) % size;
        let straight = self.count.min(size - start);
        let wrapped = self.count - straight;
        let mut runs = vec![Span::new(self.buffer, start, straight)];
        if wrapped > 0 {
            runs.push(Span::new(self.buffer, 0, wrapped));
        }
        runs
    }
}

/// All rounds of a program, in order.
pub(super) struct Rounds {
    pub(super) me: usize,
    pub(super) size: usize,
    pub(super) rounds: Vec<Round>,
}

impl Rounds {
    pub(super) fn new(ask: &Ask, rounds: Vec<Round>) -> Self {
        Self { me: ask.rank, size: ask.size, rounds }
    }

    /// Number of the first channel that `writer` uses in round `k`.
    fn channel(&self, writer: usize, k: usize) -> usize {
        self.rounds[..k].iter().map(|round| round.messages(writer, self.size).len()).sum()
    }

    /// My messages of round `k`, each on a new channel.
    pub(super) fn send(&self, draft: &mut Draft, k: usize, lag: usize, tee: Option<Span>) {
        let round = &self.rounds[k];
        for message in round.messages(self.me, self.size) {
            let channel = draft.channel(vec![(self.me + round.distance) % self.size]);
            draft.send(lag, channel, message, tee);
        }
    }

    /// What I read in round `k`.
    pub(super) fn sources(&self, k: usize) -> Vec<Source> {
        let round = &self.rounds[k];
        let rank = (self.me + self.size - round.distance) % self.size;
        let first = self.channel(rank, k);
        round
            .messages(rank, self.size)
            .into_iter()
            .enumerate()
            .map(|(i, message)| Source {
                rank,
                channel: first + i,
                reader: 0,
                message,
                take: (0, message.blocks),
            })
            .collect()
    }

    /// Rounds `from..` as an all_gather: sent with lag `lag`, `lag + 1`, .. and received into the same blocks of
    /// Out one segment later. Where the first sends from In, it keeps the block in Out too.
    pub(super) fn gather(&self, draft: &mut Draft, from: usize, lag: usize) {
        for k in from..self.rounds.len() {
            let lag = lag + k - from;
            let tee = (self.rounds[k].buffer == Buffer::In).then_some(Span::output(self.me));
            self.send(draft, k, lag, tee);
            for source in self.sources(k) {
                let to = Span { buffer: Buffer::Out, ..source.message };
                draft.step(lag + 1, Step::Receive { from: source, to, forward: None });
            }
        }
    }
}
