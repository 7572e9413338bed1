//! The proof: replays the programs of all ranks symbolically and refuses what is wrong.
//!
//! Of every operation it proves, for the sizes, depth and aliasing given, that
//! - each segment of each output block has exactly the right contributors, each once, and a reduction went
//!   through exactly one `finish`; that all ranks of an all_reduce combine in the same order (so have the same
//!   bits), and where the plan says so in the order of the canonical tree; that all ranks of an all_gather and an all_reduce
//!   have the same of what a link rounds; that nobody leaves a barrier before all have come;
//! - nothing is read before it is written, nor overwritten while another lane may still use it, nor, in place,
//!   while its input is still needed;
//! - what a reader expects of a message is what the writer sent, and every message is read;
//! - `depth` cells a channel cannot deadlock, in a sequence of operations that share their cells, nor with
//!   another sequence running at the same time.

mod clock;
mod error;
mod memory;
mod replay;
mod results;
mod rules;
mod shape;
mod traffic;
mod value;

pub use error::{Element, Error, Position};
pub use shape::{Operation, Sizes};
pub use traffic::{Link, traffic};

use crate::algorithms::{Algorithm, plan};
use crate::ir::{Ask, Collective, Program};
use crate::topology::Topology;
use replay::Replay;

/// The programs of all ranks, or `None` where the algorithm does not do it.
pub fn programs(
    algorithm: Algorithm,
    collective: Collective,
    topology: &Topology,
    root: usize,
    uneven_pairs: bool,
) -> Option<Vec<Program>> {
    let ask = Ask { collective, rank: 0, size: topology.size(), root, uneven_pairs, canonical: false };
    programs_for(algorithm, &ask, topology)
}

/// The same, as any of the ranks asks.
pub fn programs_for(algorithm: Algorithm, ask: &Ask, topology: &Topology) -> Option<Vec<Program>> {
    (0..ask.size).map(|rank| plan(algorithm, &Ask { rank, ..*ask }, topology)).collect()
}

/// Checks one operation with `depth` cells a channel.
pub fn check(operation: &Operation<'_>, depth: usize) -> Result<(), Error> {
    check_sequence(std::slice::from_ref(operation), depth)
}

/// The same where elements travel between nodes in a [`Format`](crate::Format): what crosses is rounded, and so is what all
/// ranks are to have alike, where it is made.
pub fn check_rounded(operation: &Operation<'_>, depth: usize, nodes: &Topology) -> Result<(), Error> {
    check_all(&[std::slice::from_ref(operation)], depth, Ways { rounded: Some(nodes), ..Ways::default() })
}

/// The same where messages of some channels (writer, its channel) are the memory that they are sent from, and readers take them
/// there: nobody writes what others may still read.
pub fn check_by_reference(
    operation: &Operation<'_>,
    depth: usize,
    stays: &dyn Fn(usize, usize) -> bool,
) -> Result<(), Error> {
    check_all(&[std::slice::from_ref(operation)], depth, Ways { stays: Some(stays), ..Ways::default() })
}

/// What messages are, where they are not copies.
#[derive(Clone, Copy, Default)]
struct Ways<'a> {
    /// Where what goes from node to node is rounded.
    rounded: Option<&'a Topology>,
    /// Which channels' messages are the memory that they are sent from.
    stays: Option<&'a dyn Fn(usize, usize) -> bool>,
}

/// Checks operations of one group, one after the other, in the same cells.
pub fn check_sequence(operations: &[Operation<'_>], depth: usize) -> Result<(), Error> {
    check_concurrent(&[operations], depth)
}

/// Checks sequences that run at the same time, each in cells of its own: the reserve that every started
/// operation holds.
pub fn check_concurrent(sequences: &[&[Operation<'_>]], depth: usize) -> Result<(), Error> {
    check_all(sequences, depth, Ways::default())
}

fn check_all(sequences: &[&[Operation<'_>]], depth: usize, ways: Ways<'_>) -> Result<(), Error> {
    let mut operation = 0;
    for sequence in sequences {
        for op in *sequence {
            if depth == 0 || op.size() != sequence[0].size() {
                let at = Position { operation, ..Position::default() };
                return Err(Error::Malformed {
                    at,
                    what: "no cells, or groups of different size in a sequence",
                });
            }
            rules::check(op, operation)?;
            operation += 1;
        }
    }
    let mut replay = Replay::new(sequences, depth, ways);
    replay.run()?;
    for (operation, op, memory, began, ended) in replay.results() {
        results::check(op, operation, memory, &replay.values, ways.rounded.is_some())?;
        if op.collective == Collective::Barrier {
            results::barrier(operation, began, ended)?;
        }
    }
    Ok(())
}
