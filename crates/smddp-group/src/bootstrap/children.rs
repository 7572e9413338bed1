//! Connections of the children: acceptance, authentication and their messages.

use std::io;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use smddp_base::warning::warn;
use smddp_net::handshake::is_unauthenticated;
use smddp_net::token::TAG;

use super::link::TreeLink;
use super::parent::ParentLink;
use super::payload::{connection_lost, encode_downward, parse};
use super::{RankTree, SUSPECT_AFTER, tree_shape};

/// Maximum number of accepted connections that are not authenticated yet. Further ones wait in the listeners' queues.
pub(super) const MAX_INCOMING: usize = 256;
/// Age at which an unauthenticated connection is closed while the maximum number is reached.
pub(super) const GREETING_TIMEOUT: Duration = Duration::from_secs(1);

/// A child in the tree.
pub(super) struct ChildLink {
    /// `None` if the child has no connection, or its connection was closed.
    pub(super) link: Option<TreeLink>,
    /// Set once the child has sent its information.
    pub(super) reported: bool,
    /// Authentication code of the child's message that was relayed through the store. The reply is bound to it.
    pub(super) relay_tag: Option<[u8; TAG]>,
}

impl RankTree {
    /// Returns the children that have not sent their information.
    pub(super) fn pending_children(&self) -> Vec<usize> {
        let reported = |child: &usize| self.children.get(child).is_some_and(|child| child.reported);
        tree_shape::children(self.rank, self.size).filter(|child| !reported(child)).collect()
    }

    pub(super) fn is_connected(&self, child: usize) -> bool {
        self.children.get(&child).is_some_and(|child| child.link.is_some())
    }

    /// Returns the children without a connection that have not sent their information.
    pub fn unconnected(&self) -> Vec<usize> {
        let mut pending_children = self.pending_children();
        pending_children.retain(|child| !self.children.contains_key(child));
        pending_children
    }

    /// Returns true if incoming connections are processed: once this rank's link to its parent is authenticated, or is unlikely to be
    /// soon.
    pub(super) fn accepts_children(&self, now: Instant) -> bool {
        match &self.parent_link {
            ParentLink::Absent | ParentLink::Unreached { .. } => true,
            ParentLink::Unknown => false,
            ParentLink::Connecting { attempt, .. } => now.duration_since(attempt.since) >= 2 * SUSPECT_AFTER,
            ParentLink::Connected { link, attempt } => {
                link.is_authenticated() || now.duration_since(attempt.since) >= 2 * SUSPECT_AFTER
            }
        }
    }

    /// Accepts connections of children and authenticates them.
    pub(super) fn accept_children(&mut self, now: Instant) {
        let mut unauthenticated = Vec::new();
        for listener in &self.listeners {
            // A shortage of descriptors may be temporary: pending connections remain in the queue.
            while self.incoming.len() < MAX_INCOMING
                && let Ok(link) = TreeLink::accept(listener.as_fd(), now)
            {
                match link.check_user() {
                    Ok(()) => self.incoming.push(link),
                    Err(error) => unauthenticated.push(error),
                }
            }
        }
        unauthenticated.iter().for_each(|error| self.reject(error));
        if !self.accepts_children(now) {
            return;
        }
        for mut link in std::mem::take(&mut self.incoming) {
            match link.handshake(&self.address.id, self.token.as_ref()).map(|known| (known, link.from)) {
                Ok((false, _)) => self.incoming.push(link),
                Ok((true, child))
                    if self.pending_children().contains(&child) && !self.is_connected(child) =>
                {
                    // The group has failed before this child connected.
                    if let Some(outcome) = &self.outcome {
                        link.send_text(&encode_downward(outcome));
                    }
                    self.children
                        .insert(child, ChildLink { link: Some(link), reported: false, relay_tag: None });
                }
                Err(error) if is_unauthenticated(&error) => self.reject(&error),
                // A second process of that rank: the store shows it, and the end of either connection would appear as a lost parent.
                Ok((true, _)) if self.duplicates.len() < MAX_INCOMING => self.duplicates.push(link),
                // A second connection of a child, or a closed connection.
                Ok(_) | Err(_) => {}
            }
        }
        if self.incoming.len() == MAX_INCOMING {
            self.incoming.retain(|link| now.duration_since(link.since) < GREETING_TIMEOUT);
        }
    }

    /// Logs the first rejected connection: repeated ones must not fill the log.
    fn reject(&mut self, reason: &io::Error) {
        if !std::mem::replace(&mut self.reject_logged, true) {
            warn(&format!(
                "rejected a connection to rank {} while the group is made: {reason}. The job continues; further rejected \
                 connections are not logged (docs/security.md)",
                self.rank,
            ));
        }
    }

    /// Reads the messages of all connected children. A child sends one message, and another one only after a failure.
    pub(super) fn read_children(&mut self) {
        let (max_bytes, mut received) = (self.max_bytes(), Vec::new());
        if self.outcome.is_some() {
            return;
        }
        for (rank, child) in &mut self.children {
            let Some(link) = &mut child.link else { continue };
            match link.read(max_bytes) {
                Ok(None) => {}
                Ok(Some(bytes)) => {
                    child.reported = true;
                    received.push((*rank, Ok(bytes)));
                }
                Err(error) => received.push((*rank, Err(connection_lost(*rank, &error)))),
            }
        }
        for (rank, message) in received {
            match message {
                Ok(bytes) => self.accept_rank_infos(rank, &bytes),
                Err(failure) => self.fail(failure),
            }
        }
    }

    /// Records the rank information in a child's message, or its failure.
    pub(super) fn accept_rank_infos(&mut self, child: usize, bytes: &[u8]) {
        match parse(child, bytes) {
            Ok(rank_infos) => {
                for (rank, rank_info) in rank_infos {
                    if (rank as usize) < self.size {
                        self.rank_infos.entry(rank as usize).or_insert(rank_info);
                    }
                }
            }
            Err(failure) => self.fail(failure),
        }
    }
}
