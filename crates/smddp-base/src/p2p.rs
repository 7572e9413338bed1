//! Point-to-point messages between two ranks.

/// Envelope of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// Tag of the message.
    pub tag: u64,
    /// Data type of the elements, as a number that the core defines.
    pub dtype: u64,
    /// Payload size in bytes.
    pub bytes: u64,
}

/// A message at its sender or at its receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MessageId {
    /// The transport between nodes carries the message.
    pub is_remote: bool,
    /// Index of the peer on this node, or its rank if it is on another node.
    pub peer: usize,
    /// Number of the message in its transport.
    pub number: u64,
}

impl MessageId {
    /// Identifies a message within this node.
    pub const fn local(peer: usize, number: u64) -> Self {
        Self { is_remote: false, peer, number }
    }

    /// Identifies a message to or from another node.
    pub const fn remote(peer: usize, number: u64) -> Self {
        Self { is_remote: true, peer, number }
    }
}

/// Messages of one rank over one transport. No method blocks; `None` or `false` means "not yet".
pub trait MessageTransport {
    /// Starts sending a message.
    fn announce(&mut self, to: usize, envelope: Envelope) -> Option<MessageId>;
    /// Returns the next free slot of an outgoing message: its address and its size in bytes.
    fn send_slot(&mut self, message: MessageId) -> Option<(*mut u8, usize)>;
    /// Sends a message that was just announced from `at` instead of through slots. `false`: the message needs slots.
    ///
    /// # Safety
    /// The whole payload at `at` is valid for reads and unchanged until [`Self::is_sent`] returns true or the group releases user
    /// buffers.
    unsafe fn send_in_place(&mut self, _message: MessageId, _at: *const u8) -> bool {
        false
    }
    /// Advances a message sent in place. Returns true once its memory may be reused.
    fn is_sent(&mut self, _message: MessageId) -> bool {
        true
    }
    /// Publishes the slot filled last as a fragment of `bytes` bytes.
    fn publish(&mut self, message: MessageId, bytes: usize);
    /// Ends a message whose fragments are all published. Its memory is reused once the receiver has read them.
    fn close(&mut self, message: MessageId);
    /// Returns the next message that `from` announced and that this method has not returned before.
    fn next_announced(&mut self, from: usize) -> Option<(Envelope, MessageId)>;
    /// Receives a whole message into `at` instead of through slots. `false`: the message arrives in slots.
    ///
    /// # Safety
    /// `at` is valid for writes of the whole message until [`Self::is_received`] returns true or the group releases user buffers.
    unsafe fn receive_into(&mut self, _message: MessageId, _at: *mut u8) -> bool {
        false
    }
    /// Returns true once a message received in place is complete. Must not be called again for that message afterwards.
    fn is_received(&mut self, _message: MessageId) -> bool {
        true
    }
    /// Returns the next fragment of an incoming message: its address and its size in bytes. Valid until the next call.
    fn recv_slot(&mut self, message: MessageId) -> Option<(*const u8, usize)>;
    /// Releases the fragment that [`Self::recv_slot`] returned last.
    fn release(&mut self, message: MessageId);
    /// Confirms the receipt of a message to its sender.
    fn confirm(&mut self, _message: MessageId) {}
    /// Returns true if `to` is known to have received all messages of this rank, or to have a recv for each.
    fn is_confirmed(&self, to: usize) -> bool;
}
