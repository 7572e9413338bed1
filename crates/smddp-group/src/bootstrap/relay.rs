//! Messages between a rank and a parent that it cannot reach, which the caller relays, for example through the store.

use smddp_net::token::TAG;

use super::children::ChildLink;
use super::parent::ParentLink;
use super::payload::{DOWN, UP, encode_downward, tampered};
use super::{RankTree, rank_bytes};

impl RankTree {
    /// Returns, once, the message that must be relayed to an unreachable parent, and the reason why it is unreachable.
    pub fn take_relay(&mut self) -> Option<(Vec<u8>, String)> {
        let unreached = matches!(self.parent_link, ParentLink::Unreached { relay_tag: None });
        if !unreached || !self.pending_children().is_empty() {
            return None;
        }
        let mut bytes = self.encode_upward();
        let tag = self.token.as_ref()?.tag(&[UP, &rank_bytes(self.rank), &bytes]);
        bytes.extend(tag);
        (self.parent_link, self.sent_up) = (ParentLink::Unreached { relay_tag: Some(tag) }, true);
        Some((bytes, std::mem::take(&mut self.last_error)))
    }

    /// Returns true if the result must be relayed to this rank.
    pub fn is_unreached(&self) -> bool {
        matches!(self.parent_link, ParentLink::Unreached { relay_tag: Some(_) }) && self.outcome.is_none()
    }

    /// Accepts the relayed result of an unreachable parent.
    pub fn accept_result(&mut self, bytes: &[u8]) {
        let ParentLink::Unreached { relay_tag: Some(up) } = self.parent_link else { return };
        match self.verified(DOWN, &up, bytes) {
            Some((text, _)) => self.settle(text),
            None => self.fail(tampered(self.parent().unwrap_or(0))),
        }
    }

    /// Accepts the relayed message of a child without a connection.
    pub fn accept_relayed(&mut self, child: usize, bytes: &[u8]) {
        let Some((text, tag)) = self.verified(UP, &rank_bytes(child), bytes) else {
            return self.fail(tampered(child));
        };
        self.children.insert(child, ChildLink { link: None, reported: true, relay_tag: Some(*tag) });
        self.accept_rank_infos(child, text);
    }

    /// Returns the messages that must be relayed to children without a connection, once the result is known.
    pub fn result_to_relay(&self) -> Vec<(usize, Vec<u8>)> {
        let (Some(outcome), Some(token)) = (&self.outcome, &self.token) else { return Vec::new() };
        let text = encode_downward(outcome);
        let relay_tag = self.children.iter().filter_map(|(rank, child)| Some((*rank, child.relay_tag?)));
        relay_tag.map(|(rank, up)| (rank, [&text[..], &token.tag(&[DOWN, &up, &text])].concat())).collect()
    }

    /// Splits a relayed message into text and authentication code. `None` if the code does not verify for `label` and `subject`.
    fn verified<'a>(
        &self,
        label: &[u8],
        subject: &[u8],
        bytes: &'a [u8],
    ) -> Option<(&'a [u8], &'a [u8; TAG])> {
        let (text, tag) = bytes.split_last_chunk::<TAG>()?;
        self.token.as_ref()?.verifies(&[label, subject, text], tag).then_some((text, tag))
    }
}
