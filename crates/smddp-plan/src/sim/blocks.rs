//! Bytes of spans, segment by segment.

/// Bytes of each block of a collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// `count` blocks of `each` bytes over a buffer of `bytes`, so that the last blocks may be shorter or
    /// empty.
    Row {
        /// Bytes of the buffer.
        bytes: u64,
        /// Bytes of each block.
        each: u64,
        /// Number of blocks.
        count: u64,
    },
    /// Bytes of each block.
    Sizes(Vec<u64>),
}

impl Blocks {
    /// Blocks of these lengths.
    pub fn new(lengths: &[usize]) -> Self {
        let (each, count) = (lengths.first().copied().unwrap_or(0), lengths.len());
        let bytes: usize = lengths.iter().sum();
        let row = Self::Row { bytes: bytes as u64, each: each as u64, count: count as u64 };
        match lengths.iter().enumerate().all(|(block, &length)| row.size(block as u64) == length as u64) {
            true => row,
            false => Self::Sizes(lengths.iter().map(|&length| length as u64).collect()),
        }
    }

    /// Returns the bytes of the largest block.
    pub fn largest(&self) -> u64 {
        match self {
            Self::Row { bytes, each, .. } => *each.min(bytes),
            Self::Sizes(sizes) => sizes.iter().copied().max().unwrap_or(0),
        }
    }

    /// Returns the bytes of one block. Larger block numbers wrap around (Scratch).
    pub fn size(&self, block: u64) -> u64 {
        match self {
            Self::Row { bytes, each, count } => {
                bytes.saturating_sub(block % (*count).max(1) * each).min(*each)
            }
            Self::Sizes(sizes) => sizes[block as usize % sizes.len()],
        }
    }

    /// Returns the bytes of segment `segment` of the blocks `first..first + blocks`, with `cut` bytes of each
    /// block per segment. `None` if no block has the segment. Zero blocks are a token: one message without
    /// payload.
    pub fn bytes(&self, first: u64, blocks: u64, cut: u64, segment: u64) -> Option<u64> {
        if blocks == 0 {
            return (segment == 0).then_some(0);
        }
        let begin = segment * cut;
        let part = |size: u64| size.saturating_sub(begin).min(cut);
        let sum = match self {
            Self::Row { bytes, each, count } => {
                let (count, each) = ((*count).max(1), (*each).max(1));
                let (whole, rest) = (bytes / each, bytes % each);
                // Numbers of full blocks below `x`, and of blocks with the remainder.
                let wholes = |x: u64| x / count * whole + (x % count).min(whole);
                let rests = |x: u64| x / count + u64::from(x % count > whole);
                let among = |below: &dyn Fn(u64) -> u64| below(first + blocks) - below(first);
                among(&wholes) * part(each) + if rest > 0 { among(&rests) * part(rest) } else { 0 }
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
    fn row_matches_the_list_of_its_blocks() {
        for (bytes, each, count) in
            [(0, 0, 3), (1, 64, 3), (10, 4, 3), (64, 8, 8), (1001, 192, 7), (640, 128, 9)]
        {
            let row = Blocks::Row { bytes, each, count };
            let lengths: Vec<usize> = (0..count).map(|b| row.size(b) as usize).collect();
            let listed = Blocks::Sizes(lengths.iter().map(|&length| length as u64).collect());
            assert_eq!(Blocks::new(&lengths).largest(), listed.largest());
            assert_eq!(lengths.iter().sum::<usize>() as u64, bytes);
            for (first, blocks, cut, segment) in
                [(0, count, 4, 0), (1, 1, 2, 1), (count - 1, 3, 3, 0), (0, 2 * count, 1, 2), (2, 0, 4, 0)]
            {
                assert_eq!(
                    row.bytes(first, blocks, cut, segment),
                    listed.bytes(first, blocks, cut, segment),
                    "{bytes} in {count}: {first}+{blocks} by {cut}, segment {segment}"
                );
            }
        }
        assert_eq!(Blocks::new(&[1, 2]), Blocks::Sizes(vec![1, 2]));
    }

    #[test]
    fn token_is_one_message_and_empty_block_is_none() {
        let blocks = Blocks::Sizes(vec![0, 8]);
        assert_eq!((blocks.bytes(0, 0, 4, 0), blocks.bytes(0, 0, 4, 1)), (Some(0), None));
        assert_eq!((blocks.bytes(0, 1, 4, 0), blocks.bytes(0, 2, 4, 1)), (None, Some(4)));
    }
}
