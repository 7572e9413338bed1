//! Frames that a connection has accepted and not yet sent.

use smddp_net::frame::HEADER;
use smddp_net::wire::Ticket;

/// Frame in the send queue.
pub(super) struct QueuedFrame {
    pub(super) head: [u8; HEADER],
    pub(super) payload: QueuedPayload,
    /// Bytes of head and payload that were written.
    pub(super) written: usize,
    pub(super) ticket: Option<Ticket>,
}

impl QueuedFrame {
    /// Copies a borrowed payload, so that its owner may reuse the memory.
    pub(super) fn copy_payload(&mut self) {
        if let QueuedPayload::Borrowed(..) = self.payload {
            self.payload = QueuedPayload::Owned(self.payload.bytes().into());
        }
    }
}

pub(super) enum QueuedPayload {
    Owned(Box<[u8]>),
    /// Memory that does not change until its ticket is reported or the user buffers are released.
    Borrowed(*const u8, usize),
}

impl QueuedPayload {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Owned(bytes) => bytes,
            // SAFETY: readable and unchanged until its ticket is reported or the user buffers are released, by the
            // contract of `Wire::send`.
            Self::Borrowed(address, bytes) => unsafe { std::slice::from_raw_parts(*address, *bytes) },
        }
    }
}
