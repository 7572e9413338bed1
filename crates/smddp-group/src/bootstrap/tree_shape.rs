//! Shape of the bootstrap tree. Consecutive ranks form chunks: the first rank of a chunk is the parent of its other ranks, and the
//! first ranks form a wide tree. Ranks of a node are mostly consecutive, so most connections are within a node.

/// Ranks per chunk, and child chunks per chunk. A rank has at most `2 * WIDTH - 1` children; a tree of 8,192 ranks has five levels.
const WIDTH: usize = 8;

pub(super) fn parent(rank: usize) -> Option<usize> {
    let (chunk, place) = (rank / WIDTH, rank % WIDTH);
    match (chunk, place) {
        (0, 0) => None,
        (_, 0) => Some((chunk - 1) / WIDTH * WIDTH),
        _ => Some(chunk * WIDTH),
    }
}

pub(super) fn children(rank: usize, size: usize) -> impl Iterator<Item = usize> {
    let first = rank.is_multiple_of(WIDTH);
    let chunk_ranks = (rank + 1..rank + WIDTH).filter(move |_| first);
    let below = rank / WIDTH * WIDTH + 1;
    let chunks = (below..below + WIDTH).map(|chunk| chunk * WIDTH).filter(move |_| first);
    chunk_ranks.chain(chunks).filter(move |&child| child < size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_reaches_rank_0_in_few_steps_and_has_few_children() {
        for size in (1..300).chain([1023, 1024, 8192]) {
            let mut visits = vec![0; size];
            for rank in 0..size {
                let below: Vec<usize> = children(rank, size).collect();
                assert!(below.len() < 2 * WIDTH);
                for child in below {
                    assert_eq!(parent(child), Some(rank), "{child} of {size}");
                    visits[child] += 1;
                }
                let up = std::iter::successors(parent(rank), |&above| parent(above));
                assert!(up.count() <= 5, "{rank} of {size}");
            }
            assert!(visits[0] == 0 && visits[1..].iter().all(|&times| times == 1), "{size}");
        }
    }
}
