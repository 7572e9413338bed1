//! What a piece of memory holds: which contributions to which block, combined in which order.
//!
//! Values are interned: equal numbers mean the same contributions in the same order, so the same bits.

use std::collections::HashMap;

/// A value's number.
pub(super) type Value = u32;

/// Not written.
pub(super) const NOTHING: Value = 0;

/// A set of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ranks(Vec<u64>);

impl Ranks {
    fn one(rank: usize, size: usize) -> Self {
        let mut words = vec![0; size.div_ceil(64)];
        words[rank / 64] |= 1 << (rank % 64);
        Self(words)
    }

    pub(super) fn has(&self, rank: usize) -> bool {
        self.0[rank / 64] >> (rank % 64) & 1 == 1
    }

    /// Adds the members of `other`; the first that was there already is an error.
    fn add(&mut self, other: &Self) -> Result<(), usize> {
        for (i, (mine, theirs)) in self.0.iter_mut().zip(&other.0).enumerate() {
            let both = *mine & theirs;
            if both != 0 {
                return Err(i * 64 + both.trailing_zeros() as usize);
            }
            *mine |= theirs;
        }
        Ok(())
    }

    fn count(&self) -> usize {
        self.0.iter().map(|w| w.count_ones() as usize).sum()
    }
}

#[derive(Debug)]
pub(super) struct Known {
    /// The block that this is (a part of).
    pub(super) block: usize,
    pub(super) ranks: Ranks,
    pub(super) finished: bool,
}

/// Why values do not combine.
#[derive(Debug)]
pub(super) enum Unfit {
    Twice(usize),
    Mixed(usize, usize),
    Finished,
}

/// All values of one replay.
#[derive(Debug, Default)]
pub(super) struct Values {
    known: Vec<Known>,
    inputs: HashMap<(usize, usize, usize), Value>,
    reduced: HashMap<Box<[Value]>, Value>,
    finished: HashMap<Value, Value>,
}

impl Values {
    fn add(&mut self, known: Known) -> Value {
        self.known.push(known);
        self.known.len() as Value
    }

    /// What is known of a value; `value` is not [`NOTHING`].
    pub(super) fn get(&self, value: Value) -> &Known {
        &self.known[value as usize - 1]
    }

    /// Rank `rank`'s own contribution to `block`, in a group of `size`.
    pub(super) fn input(&mut self, rank: usize, block: usize, size: usize) -> Value {
        if let Some(&value) = self.inputs.get(&(rank, block, size)) {
            return value;
        }
        let value = self.add(Known { block, ranks: Ranks::one(rank, size), finished: false });
        self.inputs.insert((rank, block, size), value);
        value
    }

    /// The inputs (at least one) combined in this order.
    pub(super) fn reduce(&mut self, inputs: &[Value]) -> Result<Value, Unfit> {
        if let Some(&value) = self.reduced.get(inputs) {
            return Ok(value);
        }
        let first = self.get(inputs[0]);
        let (block, mut ranks) = (first.block, first.ranks.clone());
        for (i, &input) in inputs.iter().enumerate() {
            let known = self.get(input);
            if known.finished {
                return Err(Unfit::Finished);
            }
            if known.block != block {
                return Err(Unfit::Mixed(block, known.block));
            }
            if i > 0 {
                ranks.add(&known.ranks).map_err(Unfit::Twice)?;
            }
        }
        let value = self.add(Known { block, ranks, finished: false });
        self.reduced.insert(inputs.into(), value);
        Ok(value)
    }

    /// The complete result for a group of `size`.
    pub(super) fn finish(&mut self, value: Value, size: usize) -> Result<Value, Unfit> {
        if let Some(&value) = self.finished.get(&value) {
            return Ok(value);
        }
        let known = self.get(value);
        if known.finished || known.ranks.count() != size {
            return Err(Unfit::Finished);
        }
        let known = Known { block: known.block, ranks: known.ranks.clone(), finished: true };
        let finished = self.add(known);
        self.finished.insert(value, finished);
        Ok(finished)
    }
}
