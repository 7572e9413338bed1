//! Point-to-point messages of a group.

use smddp_base::{Envelope, MessageId};

use super::group::Group;
use crate::channels::Carrier;

/// Point-to-point messages of a group. No method blocks; `None` or `false` means "not yet".
pub struct Messages<'a>(&'a mut Group);

impl Group {
    /// Returns the point-to-point messages.
    pub fn messages(&mut self) -> Messages<'_> {
        Messages(self)
    }
}

impl Messages<'_> {
    /// Returns the transport of a message. A message is valid only in the group that returned it.
    pub fn carrier(&mut self, message: MessageId) -> Carrier<'_> {
        self.transport(message.is_remote)
    }

    /// Announces a message to rank `to`; see [`smddp_base::MessageTransport::announce`].
    pub fn announce(&mut self, to: usize, envelope: Envelope) -> Option<MessageId> {
        let (mut carrier, to) = self.carrier_to(to);
        carrier.announce(to, envelope)
    }

    /// Returns the next announced message from rank `from`; see [`smddp_base::MessageTransport::next_announced`].
    pub fn next_announced(&mut self, from: usize) -> Option<(Envelope, MessageId)> {
        let (mut carrier, from) = self.carrier_to(from);
        carrier.next_announced(from)
    }

    /// Returns true if rank `to` has confirmed this rank's messages; see [`smddp_base::MessageTransport::is_confirmed`].
    pub fn is_confirmed(&mut self, to: usize) -> bool {
        let (carrier, to) = self.carrier_to(to);
        carrier.is_confirmed(to)
    }

    /// Notifies `rank`, if it is on another node, that this rank announces no further messages to it, although it remains in the group.
    pub fn announce_last(&mut self, rank: usize) {
        if self.0.routes.local_index(rank).is_none()
            && let Some(remote) = &mut self.0.remote
        {
            remote.net.announce_last(rank);
        }
    }

    /// Returns the transport of messages with `rank`, and the number by which that transport identifies the rank.
    fn carrier_to(&mut self, rank: usize) -> (Carrier<'_>, usize) {
        let local = self.0.routes.local_index(rank);
        (self.transport(local.is_none()), local.unwrap_or(rank))
    }

    fn transport(&mut self, is_remote: bool) -> Carrier<'_> {
        match &mut self.0.remote {
            Some(remote) if is_remote => remote.net.messages(),
            _ => Carrier::local(self.0.local.messages()),
        }
    }
}
