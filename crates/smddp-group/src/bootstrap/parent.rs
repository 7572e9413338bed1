//! Connection to the parent: its address record, attempts, this rank's message and the result.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_net::token::{TAG, Token};

use super::address::TreeAddress;
use super::link::TreeLink;
use super::payload::{StartupFailure, connection_lost, encode_payload, parse};
use super::{PARENT_TIMEOUT, RankTree, SUSPECT_AFTER, tree_shape};

/// Interval between two connection attempts.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// State of the connection to the parent.
pub(super) enum ParentLink {
    /// No parent: this is rank 0, or the parent has closed the connection after a failure.
    Absent,
    /// The address record is not known yet.
    Unknown,
    Connecting {
        attempt: ParentAttempt,
        next: Instant,
    },
    Connected {
        attempt: ParentAttempt,
        link: TreeLink,
    },
    /// The parent is unreachable. `relay_tag`: authentication code of this rank's message, once it was relayed through the store.
    Unreached {
        relay_tag: Option<[u8; TAG]>,
    },
}

pub(super) struct ParentAttempt {
    pub(super) address: TreeAddress,
    /// Bytes of the address record, and the time at which they were read.
    pub(super) bytes: Vec<u8>,
    pub(super) read: Instant,
    pub(super) since: Instant,
    /// Set once a connection was established: the parent runs, or ran.
    pub(super) was_reachable: bool,
}

impl RankTree {
    /// Returns the parent of this rank in the tree; `None` for rank 0.
    pub fn parent(&self) -> Option<usize> {
        tree_shape::parent(self.rank)
    }

    /// Returns true if the address records of rank 0 and of the parent must be read, or read again.
    pub fn needs_addresses(&self, now: Instant) -> bool {
        match &self.parent_link {
            ParentLink::Unknown => true,
            ParentLink::Connecting { attempt, .. } => now.duration_since(attempt.read) >= SUSPECT_AFTER,
            _ => false,
        }
    }

    /// Sets the group token and the address record of the parent. Returns true if the record is a new one.
    pub(crate) fn set_parent(
        &mut self,
        token: Arc<Token>,
        parent: &[u8],
        now: Instant,
    ) -> Result<bool, String> {
        let address = self.records.open(self.parent().unwrap_or(0), parent)?;
        self.token = Some(token);
        // The same record again must not restart the timeouts.
        let (since, next, was_reachable, new) = match &self.parent_link {
            ParentLink::Connecting { attempt, next } if attempt.bytes == parent => {
                (attempt.since, *next, attempt.was_reachable, false)
            }
            _ => (now, now, false, true),
        };
        let attempt = ParentAttempt { address, bytes: parent.to_vec(), read: now, since, was_reachable };
        self.parent_link = ParentLink::Connecting { attempt, next };
        Ok(new)
    }

    /// Connects to the parent, and retries a failed attempt until `PARENT_TIMEOUT`.
    pub(super) fn connect_parent(&mut self, now: Instant) {
        if let ParentLink::Connected { link, attempt } = &self.parent_link
            && !link.is_authenticated()
            && now.duration_since(attempt.since) >= PARENT_TIMEOUT
        {
            self.last_error = "it does not answer".to_owned();
            self.parent_link = ParentLink::Unreached { relay_tag: None };
        }
        if let (ParentLink::Connecting { attempt: ParentAttempt { address, .. }, next }, Some(token)) =
            (&self.parent_link, &self.token)
            && now >= *next
        {
            let link = TreeLink::connect(address, &self.address, self.rank, token, now);
            let parent_link =
                std::mem::replace(&mut self.parent_link, ParentLink::Unreached { relay_tag: None });
            let ParentLink::Connecting { attempt, .. } = parent_link else { return };
            match link {
                Ok(link) => self.parent_link = ParentLink::Connected { attempt, link },
                Err(error) => {
                    self.last_error = error.to_string();
                    if now.duration_since(attempt.since) < PARENT_TIMEOUT {
                        self.parent_link = ParentLink::Connecting { attempt, next: now + RETRY_INTERVAL };
                    }
                }
            }
        }
        self.exchange_with_parent(now);
    }

    fn exchange_with_parent(&mut self, now: Instant) {
        let failed = matches!(self.outcome, Some(Err(_)));
        let (max_bytes, ready) =
            (self.max_bytes(), !self.sent_up && (failed || self.pending_children().is_empty()));
        let upward = if ready { self.encode_upward() } else { Vec::new() };
        let ParentLink::Connected { link, .. } = &mut self.parent_link else { return };
        if ready {
            link.send_text(&upward);
            self.sent_up = true;
        }
        let greeted = link.handshake(&self.address.id, None);
        if self.outcome.is_some() {
            // The parent has closed the connection and cannot receive the failure.
            if greeted.is_err() {
                self.parent_link = ParentLink::Absent;
            }
            return;
        }
        let outcome = greeted.and_then(|_| link.write()).and_then(|()| link.read(max_bytes));
        let known = link.is_authenticated();
        match outcome {
            Ok(None) => {}
            Ok(Some(bytes)) => self.settle(&bytes),
            Err(error) if known => self.fail(connection_lost(self.parent().unwrap_or(0), &error)),
            Err(error) => {
                let parent_link = std::mem::replace(&mut self.parent_link, ParentLink::Absent);
                let ParentLink::Connected { mut attempt, link } = parent_link else { return };
                attempt.was_reachable |= link.was_reachable();
                (self.sent_up, self.last_error) = (false, error.to_string());
                self.parent_link = ParentLink::Connecting { attempt, next: now + RETRY_INTERVAL };
            }
        }
    }

    pub(super) fn encode_upward(&self) -> Vec<u8> {
        if let Some(Err(failure)) = &self.outcome {
            return encode_payload(&Err(failure.clone()));
        }
        let rank_infos = self.rank_infos.iter().map(|(rank, rank_info)| (*rank as u32, rank_info.clone()));
        encode_payload(&Ok(rank_infos.collect()))
    }

    /// Ends the exchange with the parent's message.
    pub(super) fn settle(&mut self, bytes: &[u8]) {
        let parent = self.parent().unwrap_or(0);
        let outcome = parse(parent, bytes).and_then(|rank_infos| {
            let rank_infos: BTreeMap<u32, Vec<u8>> = rank_infos.into_iter().collect();
            match rank_infos.len() == self.size {
                true => Ok(rank_infos.into_values().collect()),
                false => Err(StartupFailure::of(format!(
                    "rank {parent} sent the information of {} ranks, expected {}",
                    rank_infos.len(),
                    self.size
                ))),
            }
        });
        self.finish(outcome);
    }
}
