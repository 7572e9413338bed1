//! Messages between two ranks, outside the collectives.

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Envelope {
    pub tag: u64,
    pub what: u64,
    pub bytes: u64,
}

/// Where a message stands: the sender's or the receiver's half.
pub type MessageId = u64;

/// One rank's messages with others, as one carrier brings them. Nothing blocks; what cannot be done yet is `None`.
pub trait MessageTransport {
    /// Starts sending a message.
    fn open(&mut self, to: usize, envelope: Envelope) -> Option<MessageId>;
    /// Next free cell of an outgoing message: address and room in bytes.
    fn cell(&mut self, message: MessageId) -> Option<(*mut u8, usize)>;
    /// Instead of cells, for a message that was just opened: it leaves from `at`, where all of it lies, and stays unchanged there until
    /// [`Self::gone`] says so or the group lets go. `false`: it takes cells.
    fn lend(&mut self, _message: MessageId, _at: *const u8) -> bool {
        false
    }
    /// Moves such a message on; whether its memory is free.
    fn gone(&mut self, _message: MessageId) -> bool {
        true
    }
    /// The cell filled last is a piece of `bytes` now.
    fn publish(&mut self, message: MessageId, bytes: usize);
    /// Everything is written; memory comes back when the receiver is done.
    fn close(&mut self, message: MessageId);
    /// Next message that `from` announced and that was not yet taken from the wire.
    fn next(&mut self, from: usize) -> Option<(Envelope, MessageId)>;
    /// Instead of pieces: the message comes to lie at `at`, which has room for all of it, until [`Self::landed`] says that it is there or
    /// the group lets go. `false`: it comes in pieces.
    fn land(&mut self, _from: usize, _message: MessageId, _at: *mut u8) -> bool {
        false
    }
    /// Whether all of such a message is there; it is asked no more then.
    fn landed(&mut self, _from: usize, _message: MessageId) -> bool {
        true
    }
    /// Next piece of an incoming message; it is there until the next call.
    fn piece(&mut self, from: usize, message: MessageId) -> Option<(*const u8, usize)>;
    /// That piece is read.
    fn release(&mut self, from: usize, message: MessageId);
    /// Records that this rank has received one more message of `from`.
    fn confirm(&mut self, _from: usize) {}
    /// Returns true if `to` is known to have received all messages of this rank, or to have a recv for each.
    fn is_confirmed(&self, to: usize) -> bool;
}
