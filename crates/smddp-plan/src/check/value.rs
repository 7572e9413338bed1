//! Symbolic value of a piece of memory: the contributions to a block, and their combination order.
//!
//! Values are interned: equal numbers mean the same contributions in the same order, and therefore the same
//! bits.

use crate::algorithms::halves;
use crate::ir::Association;
use std::collections::HashMap;

/// Number of a value.
pub(super) type Value = u32;

/// Unwritten memory.
pub(super) const NOTHING: Value = 0;

#[derive(Clone, Copy, Debug)]
pub(super) struct ValueInfo {
    /// Block to which the value belongs.
    pub(super) block: usize,
    pub(super) finished: bool,
    /// True if rounded to the format of a link.
    pub(super) rounded: bool,
    /// Ranks of its subtree, if it was combined as a subtree of the canonical tree.
    pub(super) subtree: Option<(usize, usize)>,
    /// Set of contributors: the first word in [`Values::ranks`], and the number of words.
    ranks: (usize, usize),
}

/// Reason why values cannot be combined.
#[derive(Debug)]
pub(super) enum WrongOperand {
    Twice(usize),
    Mixed(usize, usize),
    Finished,
    /// No tree has this number of inputs.
    Tree(usize),
}

/// All values of one replay.
#[derive(Debug, Default)]
pub(super) struct Values {
    infos: Vec<ValueInfo>,
    /// Sets of ranks, concatenated, one bit per rank.
    ranks: Vec<u64>,
    /// By association and inputs.
    reduced: HashMap<Association, HashMap<Box<[Value]>, Value>>,
    finished: HashMap<Value, Value>,
    rounded: HashMap<Value, Value>,
}

impl Values {
    fn add(&mut self, info: ValueInfo) -> Value {
        self.infos.push(info);
        self.infos.len() as Value
    }

    /// Returns the properties of a value other than [`NOTHING`].
    pub(super) fn get(&self, value: Value) -> ValueInfo {
        self.infos[value as usize - 1]
    }

    fn ranks(&self, value: Value) -> &[u64] {
        let (first, words) = self.get(value).ranks;
        &self.ranks[first..first + words]
    }

    /// Returns the first of `size` ranks that did not contribute.
    pub(super) fn missing(&self, value: Value, size: usize) -> Option<usize> {
        let first =
            |(i, word): (usize, &u64)| (*word != u64::MAX).then(|| i * 64 + word.trailing_ones() as usize);
        self.ranks(value).iter().enumerate().find_map(first).filter(|&rank| rank < size)
    }

    /// Returns the contribution of `rank` to `block`, in a group of `size` ranks.
    pub(super) fn input(&mut self, rank: usize, block: usize, size: usize) -> Value {
        let (first, words) = (self.ranks.len(), size.div_ceil(64));
        self.ranks.resize(first + words, 0);
        self.ranks[first + rank / 64] |= 1 << (rank % 64);
        let subtree = Some((rank, rank + 1));
        self.add(ValueInfo { block, finished: false, rounded: false, subtree, ranks: (first, words) })
    }

    /// Returns the combination of the inputs (at least one) in this order.
    pub(super) fn reduce(
        &mut self,
        inputs: &[Value],
        association: &Association,
        size: usize,
    ) -> Result<Value, WrongOperand> {
        if let Some(&value) = self.reduced.get(association).and_then(|known| known.get(inputs)) {
            return Ok(value);
        }
        let subtree = self.subtree(inputs, association, size)?;
        let ValueInfo { block, ranks: (_, words), .. } = self.get(inputs[0]);
        let sum = self.ranks.len();
        self.ranks.resize(sum + words, 0);
        for &input in inputs {
            let info = self.get(input);
            if info.finished {
                return Err(WrongOperand::Finished);
            }
            if info.block != block {
                return Err(WrongOperand::Mixed(block, info.block));
            }
            for word in 0..words {
                let theirs = self.ranks[info.ranks.0 + word];
                let both = self.ranks[sum + word] & theirs;
                if both != 0 {
                    return Err(WrongOperand::Twice(word * 64 + both.trailing_zeros() as usize));
                }
                self.ranks[sum + word] |= theirs;
            }
        }
        let value =
            self.add(ValueInfo { block, finished: false, rounded: false, subtree, ranks: (sum, words) });
        self.reduced.entry(association.clone()).or_default().insert(inputs.into(), value);
        Ok(value)
    }

    /// Returns the subtree of the canonical tree that the combination forms, or `None` if it forms none.
    fn subtree(
        &self,
        inputs: &[Value],
        association: &Association,
        size: usize,
    ) -> Result<Option<(usize, usize)>, WrongOperand> {
        let operand_error = WrongOperand::Tree(inputs.len());
        let joins = match association {
            Association::InOrder => (0..inputs.len()).map(|input| usize::from(input > 0)).collect(),
            Association::Tree(joins) => joins.clone(),
        };
        if joins.len() != inputs.len() {
            return Err(operand_error);
        }
        let mut stack: Vec<Option<(usize, usize)>> = Vec::new();
        for (&input, joins) in inputs.iter().zip(joins) {
            stack.push(self.get(input).subtree);
            for _ in 0..joins {
                let (Some(right), Some(left)) = (stack.pop(), stack.pop()) else { return Err(operand_error) };
                stack.push(left.zip(right).and_then(|(left, right)| {
                    let siblings = left.1 == right.0 && halves(size, &(left.0..left.1), &(right.0..right.1));
                    siblings.then_some((left.0, right.1))
                }));
            }
        }
        if stack.len() == 1 { Ok(stack[0]) } else { Err(operand_error) }
    }

    /// Returns the value rounded to the format of a link. Rounding is idempotent.
    pub(super) fn round(&mut self, value: Value) -> Value {
        if value == NOTHING || self.get(value).rounded {
            return value;
        }
        if let Some(&rounded) = self.rounded.get(&value) {
            return rounded;
        }
        let rounded = self.add(ValueInfo { rounded: true, ..self.get(value) });
        self.rounded.insert(value, rounded);
        rounded
    }

    /// Returns the complete result for a group of `size` ranks.
    pub(super) fn finish(&mut self, value: Value, size: usize) -> Result<Value, WrongOperand> {
        if let Some(&value) = self.finished.get(&value) {
            return Ok(value);
        }
        let info = self.get(value);
        if info.finished || self.missing(value, size).is_some() {
            return Err(WrongOperand::Finished);
        }
        let finished = self.add(ValueInfo { finished: true, rounded: false, ..info });
        self.finished.insert(value, finished);
        Ok(finished)
    }
}
