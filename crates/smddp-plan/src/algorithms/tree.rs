//! Two binary trees, each with half of the blocks; a rank that has children in one is a leaf of the other.
//!
//! ```text
//! N = 7:  blocks 0..N/2        blocks N/2..N
//!               0                    0           the root; below it an in-order tree over 1..N,
//!               |                    |           and the same tree mirrored (N odd) or shifted by one:
//!               4                    3           the leaves of one are the inner ranks of the other
//!             /   \                /   \
//!            2     6              1     5
//!           / \   /                \   / \
//!          1   3 5                  2 4   6
//! ```
//!
//! Logarithmic latency, and every rank's bandwidth is used in both directions: Sanders, Speck and Traeff,
//! "Two-tree Algorithms for Full Bandwidth Broadcast, Reduction and Scan", 2009. One message reaches both
//! children.
//!
//! Ranks are counted from the root (`rank - root mod N`). A message carries half of the blocks, one segment of
//! each. Deadlock: with `h` the height, a rank at depth `d` sends up with lag `h - d` and down with lag `h + d`
//! (`d` in a broadcast), so everything is read one iteration after it is written: two cells a channel do.
//!
//! In place: going up only In is read; the top overwrites what the same step has read, everybody else receives
//! with a greater lag than it sent.

use super::Draft;
use crate::ir::{Ask, Buffer, Collective, Program, Source, Span, Step};

pub(super) fn plan(ask: &Ask) -> Option<Program> {
    let (up, down) = match ask.collective {
        Collective::Broadcast => (false, true),
        Collective::Reduce => (true, false),
        Collective::AllReduce => (true, true),
        _ => return None,
    };
    let trees = [false, true].map(|second| Tree { size: ask.size, root: ask.root, second });
    let mut draft = Draft::default();
    // Both trees' upward steps come first: lags ascend in a lane.
    for tree in trees.iter().filter(|_| up) {
        tree.reduce(ask.rank, &mut draft, down);
    }
    for tree in trees.iter().filter(|_| down) {
        tree.broadcast(ask.rank, &mut draft, up);
    }
    draft.lane.sort_by_key(|timed| timed.lag);
    Some(draft.done())
}

/// One of the two trees.
pub(super) struct Tree {
    pub(super) size: usize,
    pub(super) root: usize,
    pub(super) second: bool,
}

impl Tree {
    /// The parent of `rank`, or `None` at the root.
    pub(super) fn parent(&self, rank: usize) -> Option<usize> {
        let n = self.size;
        let place = self.relabel((rank + n - self.root) % n, true);
        let bit = place & place.wrapping_neg();
        if bit == 0 {
            return None;
        }
        let above = (place ^ bit) | (bit << 1);
        let above = if above < n { above } else { place ^ bit };
        Some((self.relabel(above, false) + self.root) % n)
    }

    /// Place counted from the root, to or from the place in the first tree that plays the same part. Parity
    /// changes, so leaves (odd) become inner (even), with one exception if N is even, which is a leaf twice.
    fn relabel(&self, place: usize, to_first: bool) -> usize {
        let last = self.size - 1;
        match place {
            0 => 0,
            p if !self.second => p,
            p if last.is_multiple_of(2) => self.size - p,
            p if to_first => (p + last - 2) % last + 1,
            p => p % last + 1,
        }
    }

    /// Ascending.
    pub(super) fn children(&self, rank: usize) -> Vec<usize> {
        let n = self.size;
        let place = self.relabel((rank + n - self.root) % n, true);
        // A child's lowest bit is lower, and it differs from its parent by that bit.
        let lowest = if place == 0 { n.next_power_of_two() } else { place & place.wrapping_neg() };
        let bits = std::iter::successors(Some(1), |bit| Some(2 * bit)).take_while(|&bit| bit < lowest);
        let mut children: Vec<usize> = bits
            .flat_map(|bit| [place.wrapping_sub(bit), place + bit])
            .filter(|&child| child < n)
            .map(|child| (self.relabel(child, false) + self.root) % n)
            .filter(|&child| self.parent(child) == Some(rank))
            .collect();
        children.sort_unstable();
        children
    }

    pub(super) fn depth(&self, rank: usize) -> usize {
        std::iter::successors(self.parent(rank), |&r| self.parent(r)).count()
    }

    fn height(&self) -> usize {
        (0..self.size).map(|r| self.depth(r)).max().unwrap_or(0)
    }

    /// This tree's half of the blocks.
    fn half(&self, buffer: Buffer) -> Span {
        let middle = self.size / 2;
        if self.second { Span::new(buffer, middle, self.size - middle) } else { Span::new(buffer, 0, middle) }
    }

    /// Number of the channel on which `rank` writes upward (`down == false`) or downward, in the order in
    /// which [`plan`] makes them. `others`: whether the program has the other direction too.
    fn channel(&self, rank: usize, down: bool, others: bool) -> usize {
        let first = Tree { second: false, ..*self };
        let ups = if rank == self.root { 0 } else { 2 };
        let earlier = usize::from(self.second);
        if !down {
            return earlier;
        }
        let downs = usize::from(self.second && !first.children(rank).is_empty());
        (if others { ups } else { 0 }) + downs
    }

    fn message(&self, rank: usize, channel: usize, reader: usize, message: Span) -> Source {
        Source { rank, channel, reader, message, take: (0, message.blocks) }
    }

    /// Children's sums and mine, in rank order, to the parent; at the root to Out (and down again).
    fn reduce(&self, me: usize, draft: &mut Draft, down: bool) {
        let lag = self.height() - self.depth(me);
        let (input, children) = (self.half(Buffer::In), self.children(me));
        let up = self.parent(me).map(|parent| draft.channel(vec![parent]));
        if let (Some(channel), true) = (up, children.is_empty()) {
            return draft.send(lag, channel, input, None);
        }
        let top = up.is_none();
        let position = children.iter().filter(|&&c| c < me).count();
        let sums =
            children.iter().map(|&c| self.message(c, self.channel(c, false, down), 0, input)).collect();
        let send = if top && down { Some(draft.channel(children)) } else { up };
        let to = top.then(|| self.half(Buffer::Out));
        draft.step(lag, Step::Reduce { from: sums, own: Some((position, input)), to, send, finish: top });
    }

    /// From the parent to Out and on to the children; `reduced`: the root's [`Tree::reduce`] has sent already.
    fn broadcast(&self, me: usize, draft: &mut Draft, reduced: bool) {
        let lag = self.depth(me) + if reduced { self.height() } else { 0 };
        let (children, output) = (self.children(me), self.half(Buffer::Out));
        let Some(parent) = self.parent(me) else {
            if !reduced {
                let channel = draft.channel(children);
                draft.send(lag, channel, self.half(Buffer::In), Some(output));
            }
            return;
        };
        let reader = self.children(parent).iter().position(|&c| c == me).unwrap_or(0);
        let top_sends_input = parent == self.root && !reduced;
        let message = if top_sends_input { self.half(Buffer::In) } else { output };
        let from = self.message(parent, self.channel(parent, true, reduced), reader, message);
        let forward = (!children.is_empty()).then(|| draft.channel(children));
        draft.step(lag, Step::Receive { from, to: output, forward });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_hangs_on_the_root_and_is_inner_at_most_once() {
        for size in 2..70 {
            for root in [0, size / 2, size - 1] {
                let trees = [false, true].map(|second| Tree { size, root, second });
                for rank in 0..size {
                    for tree in &trees {
                        assert!(tree.depth(rank) <= size.ilog2() as usize + 1, "{size} {root} {rank}");
                        let children: Vec<_> = (0..size).filter(|&r| tree.parent(r) == Some(rank)).collect();
                        assert_eq!(tree.children(rank), children);
                        assert!(children.len() <= 2);
                        assert_eq!(tree.parent(rank).is_none(), rank == root);
                    }
                    let inner = trees.iter().filter(|t| !t.children(rank).is_empty()).count();
                    assert!(rank == root || inner <= 1, "{size} {root} {rank}");
                }
            }
        }
    }
}
