//! Plan checker: executes the programs of all ranks symbolically and rejects incorrect plans.
//!
//! For the given sizes, depth and aliasing it proves for every operation:
//! - Each segment of each output block has exactly the required contributors, each once, and a reduction
//!   passed exactly one `finish`.
//! - All ranks of an all_reduce combine in the same order and get the same bits. If the plan declares it, the
//!   order is that of the canonical tree.
//! - All ranks of an all_gather and an all_reduce have the same value of data that a link rounds.
//! - No rank leaves a barrier before all ranks entered it.
//! - No memory is read before it is written, nor overwritten while another pipeline may still use it. In
//!   place, no input is overwritten while it is still needed.
//! - Every message matches the expectation of its reader, and every message is read.
//! - `depth` slots per channel cannot deadlock. This includes sequences of operations that share their slots,
//!   and another sequence that runs at the same time.

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
use crate::ir::{Collective, PlanRequest, Program};
use crate::topology::Topology;
use replay::Replay;

/// Returns the programs of all ranks, or `None` if the algorithm does not support the request.
pub fn programs(
    algorithm: Algorithm,
    collective: Collective,
    topology: &Topology,
    root: usize,
    uneven_pairs: bool,
) -> Option<Vec<Program>> {
    let request =
        PlanRequest { collective, rank: 0, size: topology.size(), root, uneven_pairs, canonical: false };
    programs_for(algorithm, &request, topology)
}

/// Returns the programs of all ranks for the request of any rank.
pub fn programs_for(
    algorithm: Algorithm,
    request: &PlanRequest,
    topology: &Topology,
) -> Option<Vec<Program>> {
    (0..request.size).map(|rank| plan(algorithm, &PlanRequest { rank, ..*request }, topology)).collect()
}

/// Checks one operation with `depth` slots per channel.
///
/// # Errors
/// [`Error`] with the first violation.
pub fn check(operation: &Operation<'_>, depth: usize) -> Result<(), Error> {
    check_sequence(std::slice::from_ref(operation), depth)
}

/// Checks an operation whose elements have a [`Format`](crate::Format) between nodes. Messages between nodes
/// are rounded. A result that all ranks share is rounded by its producer.
///
/// # Errors
/// [`Error`] with the first violation.
pub fn check_rounded(operation: &Operation<'_>, depth: usize, nodes: &Topology) -> Result<(), Error> {
    check_all(
        &[std::slice::from_ref(operation)],
        depth,
        MessageModes { rounded: Some(nodes), ..MessageModes::default() },
    )
}

/// Checks an operation in which some channels (writer, channel number) send messages by reference: readers
/// read the memory of the writer. No rank may write memory that others may still read.
///
/// # Errors
/// [`Error`] with the first violation.
pub fn check_by_reference(
    operation: &Operation<'_>,
    depth: usize,
    by_reference: &dyn Fn(usize, usize) -> bool,
) -> Result<(), Error> {
    check_all(
        &[std::slice::from_ref(operation)],
        depth,
        MessageModes { by_reference: Some(by_reference), ..MessageModes::default() },
    )
}

/// Transformations of messages, which are plain copies by default.
#[derive(Clone, Copy, Default)]
struct MessageModes<'a> {
    /// Nodes between which messages are rounded.
    rounded: Option<&'a Topology>,
    /// Channels whose messages are references to the memory of the writer.
    by_reference: Option<&'a dyn Fn(usize, usize) -> bool>,
}

/// Checks consecutive operations of one group, in the same slots.
///
/// # Errors
/// [`Error`] with the first violation.
pub fn check_sequence(operations: &[Operation<'_>], depth: usize) -> Result<(), Error> {
    check_concurrent(&[operations], depth)
}

/// Checks sequences that run at the same time, each in its own slots, as every started operation reserves
/// them.
///
/// # Errors
/// [`Error`] with the first violation.
pub fn check_concurrent(sequences: &[&[Operation<'_>]], depth: usize) -> Result<(), Error> {
    check_all(sequences, depth, MessageModes::default())
}

fn check_all(sequences: &[&[Operation<'_>]], depth: usize, modes: MessageModes<'_>) -> Result<(), Error> {
    let mut operation = 0;
    for sequence in sequences {
        for op in *sequence {
            if depth == 0 || op.size() != sequence[0].size() {
                let at = Position { operation, ..Position::default() };
                return Err(Error::Malformed {
                    at,
                    reason: "no slots, or groups of different sizes in a sequence",
                });
            }
            rules::check(op, operation)?;
            operation += 1;
        }
    }
    let mut replay = Replay::new(sequences, depth, modes);
    replay.run()?;
    for (operation, op, memory, began, ended) in replay.results() {
        results::check(op, operation, memory, &replay.values, modes.rounded.is_some())?;
        if op.collective == Collective::Barrier {
            results::barrier(operation, began, ended)?;
        }
    }
    Ok(())
}
