//! How bytes move between the ranks of one group.
//!
//! A [`Group`] is one rank's end of a communicator: shared memory with the ranks of its node and, where there are ranks of
//! others, a wire to them.

pub mod bootstrap;
mod close_on_fork;
pub mod fork;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod joint;
mod net;
mod p2p;
pub mod process;
mod rank_info;
pub mod shm;
mod socket_io;
pub mod threads;
mod token;
pub mod warning;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use joint::{Group, RoutedChannels, Routes};
pub use net::{fabric, interface};
pub use p2p::{Envelope, MessageId, MessageTransport};
pub use process::{Exporter, MemoryExport, SingleCopy, Sleeper, SymmetricBuffer, SymmetricUsage};
pub use rank_info::{RankInfo, RankInfoError, host_name};
pub use shm::{SharedPage, ZeroCopySource};
pub use token::Token;

/// Whoever panicked held no half-made state that matters more than going on.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a call is: the same on all its ranks, whatever the bits mean to the core.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallFingerprint {
    pub what: u64,
    pub count: u64,
}

/// One channel that this rank writes in an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendChannel {
    /// Ranks that read it, ascending; [`SendChannel::REMOTE`] for one that another wire serves.
    pub readers: Vec<usize>,
    /// Bytes of the largest message.
    pub cell: usize,
    /// Messages in the whole operation.
    pub messages: u64,
    /// Payload in the whole operation, held against what each reader expects.
    pub bytes: u64,
}

impl SendChannel {
    pub(crate) const REMOTE: usize = usize::MAX;
}

/// One channel that this rank reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvChannel {
    pub rank: usize,
    pub channel: usize,
    /// My index among its readers.
    pub reader: usize,
    /// Bytes of the largest message.
    pub cell: usize,
    pub messages: u64,
    pub bytes: u64,
}

/// The channels of one bound call's operations at one rank.
#[derive(Clone, Debug, Default)]
pub struct Channels {
    pub send_channels: Vec<SendChannel>,
    pub recv_channels: Vec<RecvChannel>,
    /// Every channel carries one message that fits a slot: payload travels with the header.
    pub inline: bool,
    /// Cells per channel wanted, and the fewest that work.
    pub depth: (usize, usize),
    /// Cells per channel on which all ranks agree: how far a writer on another node may be ahead of a reader.
    pub window: usize,
}

/// Two ranks made different calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    pub rank: usize,
    pub theirs: CallFingerprint,
    /// Bytes on the channel: expected here, offered there (only where the heads agree).
    pub bytes: Option<(u64, u64)>,
}

/// Why a rank will not come any more.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process is gone without having left the group.
    Lost { rank: usize, how: String },
    /// This process cannot reach the rank, which may be well: it lacks something.
    Unable { rank: usize, reason: String },
    /// The rank left the group (closed it or exited in good order).
    Left { rank: usize },
    /// The rank declared the group unusable, and says why.
    Poisoned { rank: usize, reason: String },
    /// Operation `seq` is over here, which needed nothing of that rank, and it made another call.
    Differs { seq: u64, mine: CallFingerprint, found: Mismatch },
}

impl Fault {
    /// Rank of a loss, a departure or an abort report.
    pub fn rank(&self) -> Option<usize> {
        match self {
            Self::Lost { rank, .. } | Self::Left { rank } | Self::Poisoned { rank, .. } => Some(*rank),
            Self::Unable { .. } | Self::Differs { .. } => None,
        }
    }
}

/// Bytes of the text in which a rank tells why the group is dead.
pub const MAX_ABORT_REPORT: usize = 2000;
