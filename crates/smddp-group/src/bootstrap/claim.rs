//! Claim of a process on its rank, for as long as its group is open: a listening socket, named in the rank's address record.

use std::io::ErrorKind;
use std::os::fd::OwnedFd;

use smddp_base::CloseOnFork;

use super::RankTree;
use super::address::parse_unverified;
use super::link::dial;

/// The socket of a claim. The kernel closes it when the process ends; a forked child does not keep it.
pub struct Claim {
    _listener: Option<CloseOnFork<OwnedFd>>,
}

/// Another process that joined the group as this rank before: "pid 5 on host a".
pub enum Holder {
    /// It still holds the rank.
    Open(String),
    /// It runs on another host, or as another user: its state is not known.
    Unknown(String),
}

impl RankTree {
    /// Ends the exchange of rank information and keeps the claim on the rank.
    pub fn into_claim(mut self) -> Claim {
        Claim { _listener: (!self.listeners.is_empty()).then(|| self.listeners.swap_remove(0)) }
    }

    /// The process that joined with the address record `record`. `None` if that is this process, or has left the group.
    pub fn holder(&self, record: &[u8]) -> Option<Holder> {
        let (other, mine) = (parse_unverified(record)?, &self.address);
        if !other.is_local(mine) {
            return Some(Holder::Unknown(other.process()));
        }
        if other.process_id == mine.process_id {
            return None;
        }
        match dial(&other, mine) {
            Err(error) if error.kind() != ErrorKind::WouldBlock => None,
            _ => Some(Holder::Open(other.process())),
        }
    }
}
