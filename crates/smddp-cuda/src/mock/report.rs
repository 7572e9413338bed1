//! What the checker has to say.

use std::fmt;

use crate::Wait;

/// Something that a stream or a host did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// "rank 0, stream 1" or "rank 0, host".
    pub actor: String,
    /// Its place in the actor's order, from 1.
    pub number: u64,
    /// "copy of 64 bytes from 0x.. to 0x..".
    pub what: String,
    /// What [`Process::label`](super::Process::label) said at the time.
    pub label: Option<String>,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, operation {}", self.actor, self.number)?;
        if let Some(label) = &self.label {
            write!(f, " ({label})")?;
        }
        write!(f, ": {}", self.what)
    }
}

/// Kinds of mistakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Two operations touch the same bytes, one of them writes, and nothing orders them.
    Race,
    /// Parts of one operation do.
    Overlap,
    /// Memory was freed (or made unknown to the device) and nothing orders a use before that.
    Freed,
    /// The same, of another process's memory mapped here.
    Closed,
    /// An address at which this process has no memory that the device knows.
    Unknown,
    /// Device memory was read that nothing wrote.
    Unwritten,
    /// A wait was never let through.
    Stuck,
    /// A handle of another process or one destroyed, memory freed twice, and the like.
    Misuse,
}

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub fault: Fault,
    /// For reading: what, where, and by which operations.
    pub text: String,
    /// The operations that took part, the earlier checked first.
    pub operations: Vec<Operation>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.fault, self.text)?;
        for operation in &self.operations {
            write!(f, "\n    {operation}")?;
        }
        Ok(())
    }
}

/// Which wait: stable from run to run as long as each host enqueues the same on each of its streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WaitId {
    /// The process's number, from 0 in the order of [`World::process`](super::World::process).
    pub process: usize,
    /// The stream's number in the process: in the order of creation, a default stream when it is first used.
    pub stream: usize,
    /// The wait's number on the stream, from 0.
    pub index: u64,
}

/// A wait that was enqueued, or would have been.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitSeen {
    pub id: WaitId,
    /// The operation, in words.
    pub what: String,
    /// The word waited for; `None` for an event.
    pub word: Option<Wait>,
    /// When it was enqueued, nothing that lets it through had been: the stream stands until some host goes on. Where
    /// a protocol has no such waits its streams cannot stand for ever.
    pub early: bool,
    /// Whether the stream knew already all that it could learn from it. `None` until the wait is passed.
    pub redundant: Option<bool>,
}

/// A call that a driver may hold until the device is idle, made while a stream stood, or would come to stand, at a wait
/// that nothing enqueued so far lets through. If it is the caller, or a thread that the driver holds up with it, who has
/// yet to enqueue that, both stand for ever. Which such calls there are depends on the delays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stall {
    pub call: Operation,
    pub wait: Operation,
}
