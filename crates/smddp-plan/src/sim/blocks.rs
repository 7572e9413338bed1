//! Bytes of spans, segment by segment.

/// How many bytes each block of a collective has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// `bytes` cut into `count` blocks; the first `bytes % count` have one byte more.
    Even {
        bytes: u64,
        count: u64,
    },
    Sizes(Vec<u64>),
}

impl Blocks {
    /// Bytes of the largest block.
    pub fn largest(&self) -> u64 {
        match self {
            Self::Even { bytes, count } => bytes.div_ceil((*count).max(1)),
            Self::Sizes(sizes) => sizes.iter().copied().max().unwrap_or(0),
        }
    }

    /// Bytes of one block; numbers beyond the last start again (Scratch).
    pub fn size(&self, block: u64) -> u64 {
        match self {
            Self::Even { bytes, count } => {
                let count = (*count).max(1);
                bytes / count + u64::from(block % count < bytes % count)
            }
            Self::Sizes(sizes) => sizes[block as usize % sizes.len()],
        }
    }

    /// Bytes of segment `segment` of the blocks `first..first + blocks`, where segments have `cut` bytes a block;
    /// `None` where no block has such a segment. No blocks are a token: one message of no bytes.
    pub fn bytes(&self, first: u64, blocks: u64, cut: u64, segment: u64) -> Option<u64> {
        if blocks == 0 {
            return (segment == 0).then_some(0);
        }
        let begin = segment * cut;
        let part = |size: u64| size.saturating_sub(begin).min(cut);
        let sum = match self {
            Self::Even { bytes, count } => {
                let count = (*count).max(1);
                let (small, longer) = (bytes / count, bytes % count);
                // Blocks below `x` that have one byte more.
                let below = |x: u64| x / count * longer + (x % count).min(longer);
                let long = below(first + blocks) - below(first);
                long * part(small + 1) + (blocks - long) * part(small)
            }
            Self::Sizes(_) => (first..first + blocks).map(|b| part(self.size(b))).sum(),
        };
        (sum > 0).then_some(sum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn even_blocks_are_counted_as_if_listed() {
        for (bytes, count) in [(0, 3), (1, 3), (10, 3), (64, 8), (1001, 7)] {
            let even = Blocks::Even { bytes, count };
            let listed = Blocks::Sizes((0..count).map(|b| even.size(b)).collect());
            assert_eq!((0..count).map(|b| even.size(b)).sum::<u64>(), bytes);
            for (first, blocks, cut, segment) in
                [(0, count, 4, 0), (1, 1, 2, 1), (count - 1, 3, 3, 0), (0, 2 * count, 1, 2), (2, 0, 4, 0)]
            {
                assert_eq!(
                    even.bytes(first, blocks, cut, segment),
                    listed.bytes(first, blocks, cut, segment),
                    "{bytes} in {count}: {first}+{blocks} by {cut}, segment {segment}"
                );
            }
        }
    }

    #[test]
    fn a_token_is_one_message_and_an_empty_block_none() {
        let blocks = Blocks::Sizes(vec![0, 8]);
        assert_eq!((blocks.bytes(0, 0, 4, 0), blocks.bytes(0, 0, 4, 1)), (Some(0), None));
        assert_eq!((blocks.bytes(0, 1, 4, 0), blocks.bytes(0, 2, 4, 1)), (None, Some(4)));
    }
}
