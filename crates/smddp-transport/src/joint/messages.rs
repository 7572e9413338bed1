//! Point-to-point messages of a group.

use super::group::Group;
use crate::{Envelope, MessageId, MessageTransport};

impl Group {
    /// Calls `call` with the message transport to `rank` and its number in that transport.
    pub(super) fn p2p<T>(
        &mut self,
        rank: usize,
        call: impl FnOnce(&mut dyn MessageTransport, usize) -> T,
    ) -> T {
        match (self.routes.local_index(rank), &mut self.remote) {
            (None, Some(remote)) => remote.net.p2p(|transport| call(transport, rank)),
            (local, _) => call(self.local.p2p(), local.unwrap_or(rank)),
        }
    }

    /// See [`MessageTransport::announce`]; the other `p2p_` methods correspond to its methods, too.
    pub fn p2p_announce(&mut self, to: usize, envelope: Envelope) -> Option<MessageId> {
        self.p2p(to, |transport, to| transport.announce(to, envelope))
    }

    pub fn p2p_send_slot(&mut self, to: usize, message: MessageId) -> Option<(*mut u8, usize)> {
        self.p2p(to, |transport, _| transport.send_slot(message))
    }

    pub fn p2p_send_in_place(&mut self, to: usize, message: MessageId, at: *const u8) -> bool {
        self.p2p(to, |transport, _| transport.send_in_place(message, at))
    }

    pub fn p2p_is_sent(&mut self, to: usize, message: MessageId) -> bool {
        self.p2p(to, |transport, _| transport.is_sent(message))
    }

    pub fn p2p_publish(&mut self, to: usize, message: MessageId, bytes: usize) {
        self.p2p(to, |transport, _| transport.publish(message, bytes));
    }

    pub fn p2p_close(&mut self, to: usize, message: MessageId) {
        self.p2p(to, |transport, _| transport.close(message));
    }

    pub fn p2p_next_announced(&mut self, from: usize) -> Option<(Envelope, MessageId)> {
        self.p2p(from, |transport, from| transport.next_announced(from))
    }

    pub fn p2p_receive_into(&mut self, from: usize, message: MessageId, at: *mut u8) -> bool {
        self.p2p(from, |transport, from| transport.receive_into(from, message, at))
    }

    pub fn p2p_is_received(&mut self, from: usize, message: MessageId) -> bool {
        self.p2p(from, |transport, from| transport.is_received(from, message))
    }

    pub fn p2p_recv_slot(&mut self, from: usize, message: MessageId) -> Option<(*const u8, usize)> {
        self.p2p(from, |transport, from| transport.recv_slot(from, message))
    }

    pub fn p2p_release(&mut self, from: usize, message: MessageId) {
        self.p2p(from, |transport, from| transport.release(from, message));
    }

    pub fn p2p_confirm(&mut self, from: usize) {
        self.p2p(from, |transport, from| transport.confirm(from));
    }

    pub fn p2p_is_confirmed(&mut self, to: usize) -> bool {
        self.p2p(to, |transport, to| transport.is_confirmed(to))
    }

    /// Notifies `rank`, if it is on another node, that this rank announces no further messages to it, although it remains in the group.
    pub fn p2p_announce_last(&mut self, rank: usize) {
        if self.routes.local_index(rank).is_none()
            && let Some(remote) = &mut self.remote
        {
            remote.net.announce_last(rank);
        }
    }

    /// Returns true if `rank`, of another node, announces no further messages. Payload of announced messages may still be pending.
    pub fn p2p_is_finished(&self, rank: usize) -> bool {
        self.path_to(rank).is_err_and(|net| net.all_announced(rank))
    }
}
