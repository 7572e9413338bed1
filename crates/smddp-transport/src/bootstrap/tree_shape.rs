//! The tree that cards go up and down: in rank order, a chunk of ranks under its first one, those in a wide tree. Ranks of a
//! node mostly follow each other, so most connections stay in it.

/// Ranks of a chunk, and chunks under a chunk: a rank has at most `2 * WIDTH - 1` children, and the tree of 8,192 ranks five
/// levels.
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
    let mates = (rank + 1..rank + WIDTH).filter(move |_| first);
    let below = rank / WIDTH * WIDTH + 1;
    let chunks = (below..below + WIDTH).map(|chunk| chunk * WIDTH).filter(move |_| first);
    mates.chain(chunks).filter(move |&child| child < size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_hangs_on_rank_0_by_a_few_steps_and_has_few_children() {
        for size in (1..300).chain([1023, 1024, 8192]) {
            let mut heard = vec![0; size];
            for rank in 0..size {
                let below: Vec<usize> = children(rank, size).collect();
                assert!(below.len() < 2 * WIDTH);
                for child in below {
                    assert_eq!(parent(child), Some(rank), "{child} of {size}");
                    heard[child] += 1;
                }
                let up = std::iter::successors(parent(rank), |&above| parent(above));
                assert!(up.count() <= 5, "{rank} of {size}");
            }
            assert!(heard[0] == 0 && heard[1..].iter().all(|&times| times == 1), "{size}");
        }
    }
}
