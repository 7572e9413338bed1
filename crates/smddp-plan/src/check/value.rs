//! What a piece of memory holds: which contributions to which block, combined in which order.
//!
//! Values are interned: equal numbers mean the same contributions in the same order, so the same bits.

use crate::algorithms::halves;
use crate::ir::Association;
use std::collections::HashMap;

/// A value's number.
pub(super) type Value = u32;

/// Not written.
pub(super) const NOTHING: Value = 0;

#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    /// The block that this is (a part of).
    pub(super) block: usize,
    pub(super) finished: bool,
    /// As it comes out of the format of a link.
    pub(super) rounded: bool,
    /// Where it was combined as a subtree of the canonical tree: its ranks.
    pub(super) subtree: Option<(usize, usize)>,
    /// The set of its contributors: first word in [`Values::ranks`], and how many.
    ranks: (usize, usize),
}

/// Why values do not combine.
#[derive(Debug)]
pub(super) enum Unfit {
    Twice(usize),
    Mixed(usize, usize),
    Finished,
    /// So many inputs have no such tree.
    Tree(usize),
}

/// All values of one replay.
#[derive(Debug, Default)]
pub(super) struct Values {
    known: Vec<Known>,
    /// Sets of ranks, one behind the other, a bit for each rank.
    ranks: Vec<u64>,
    /// By association and inputs.
    reduced: HashMap<Association, HashMap<Box<[Value]>, Value>>,
    finished: HashMap<Value, Value>,
    rounded: HashMap<Value, Value>,
}

impl Values {
    fn add(&mut self, known: Known) -> Value {
        self.known.push(known);
        self.known.len() as Value
    }

    /// What is known of a value; `value` is not [`NOTHING`].
    pub(super) fn get(&self, value: Value) -> Known {
        self.known[value as usize - 1]
    }

    fn ranks(&self, value: Value) -> &[u64] {
        let (first, words) = self.get(value).ranks;
        &self.ranks[first..first + words]
    }

    /// The first rank of `size` that did not contribute.
    pub(super) fn missing(&self, value: Value, size: usize) -> Option<usize> {
        let first =
            |(i, word): (usize, &u64)| (*word != u64::MAX).then(|| i * 64 + word.trailing_ones() as usize);
        self.ranks(value).iter().enumerate().find_map(first).filter(|&rank| rank < size)
    }

    /// Rank `rank`'s own contribution to `block`, in a group of `size`.
    pub(super) fn input(&mut self, rank: usize, block: usize, size: usize) -> Value {
        let (first, words) = (self.ranks.len(), size.div_ceil(64));
        self.ranks.resize(first + words, 0);
        self.ranks[first + rank / 64] |= 1 << (rank % 64);
        let subtree = Some((rank, rank + 1));
        self.add(Known { block, finished: false, rounded: false, subtree, ranks: (first, words) })
    }

    /// The inputs (at least one) combined in this order.
    pub(super) fn reduce(
        &mut self,
        inputs: &[Value],
        association: &Association,
        size: usize,
    ) -> Result<Value, Unfit> {
        if let Some(&value) = self.reduced.get(association).and_then(|known| known.get(inputs)) {
            return Ok(value);
        }
        let subtree = self.subtree(inputs, association, size)?;
        let Known { block, ranks: (_, words), .. } = self.get(inputs[0]);
        let sum = self.ranks.len();
        self.ranks.resize(sum + words, 0);
        for &input in inputs {
            let known = self.get(input);
            if known.finished {
                return Err(Unfit::Finished);
            }
            if known.block != block {
                return Err(Unfit::Mixed(block, known.block));
            }
            for word in 0..words {
                let theirs = self.ranks[known.ranks.0 + word];
                let both = self.ranks[sum + word] & theirs;
                if both != 0 {
                    return Err(Unfit::Twice(word * 64 + both.trailing_zeros() as usize));
                }
                self.ranks[sum + word] |= theirs;
            }
        }
        let value = self.add(Known { block, finished: false, rounded: false, subtree, ranks: (sum, words) });
        self.reduced.entry(association.clone()).or_default().insert(inputs.into(), value);
        Ok(value)
    }

    /// What part of the canonical tree comes of combining subtrees of it so; `None`: no part of it.
    fn subtree(
        &self,
        inputs: &[Value],
        association: &Association,
        size: usize,
    ) -> Result<Option<(usize, usize)>, Unfit> {
        let unfit = Unfit::Tree(inputs.len());
        let joins = match association {
            Association::InOrder => (0..inputs.len()).map(|input| usize::from(input > 0)).collect(),
            Association::Tree(joins) => joins.clone(),
        };
        if joins.len() != inputs.len() {
            return Err(unfit);
        }
        let mut stack: Vec<Option<(usize, usize)>> = Vec::new();
        for (&input, joins) in inputs.iter().zip(joins) {
            stack.push(self.get(input).subtree);
            for _ in 0..joins {
                let (Some(right), Some(left)) = (stack.pop(), stack.pop()) else { return Err(unfit) };
                stack.push(left.zip(right).and_then(|(left, right)| {
                    let meet = left.1 == right.0 && halves(size, &(left.0..left.1), &(right.0..right.1));
                    meet.then_some((left.0, right.1))
                }));
            }
        }
        if stack.len() == 1 { Ok(stack[0]) } else { Err(unfit) }
    }

    /// What comes out of the format of a link that it goes through; of what came out of one, the same.
    pub(super) fn round(&mut self, value: Value) -> Value {
        if value == NOTHING || self.get(value).rounded {
            return value;
        }
        if let Some(&rounded) = self.rounded.get(&value) {
            return rounded;
        }
        let rounded = self.add(Known { rounded: true, ..self.get(value) });
        self.rounded.insert(value, rounded);
        rounded
    }

    /// The complete result for a group of `size`.
    pub(super) fn finish(&mut self, value: Value, size: usize) -> Result<Value, Unfit> {
        if let Some(&value) = self.finished.get(&value) {
            return Ok(value);
        }
        let known = self.get(value);
        if known.finished || self.missing(value, size).is_some() {
            return Err(Unfit::Finished);
        }
        let finished = self.add(Known { finished: true, rounded: false, ..known });
        self.finished.insert(value, finished);
        Ok(finished)
    }
}
