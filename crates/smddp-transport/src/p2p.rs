//! Messages between two ranks, outside the collectives.

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mail {
    pub tag: u64,
    pub what: u64,
    pub bytes: u64,
}

/// Where a message stands: the sender's or the receiver's half.
pub type Stream = u64;

/// One rank's messages with others, as one carrier brings them. Nothing blocks; what cannot be done yet is `None`.
pub trait PointToPoint {
    /// Starts sending a message.
    fn open(&mut self, to: usize, mail: Mail) -> Option<Stream>;
    /// Next free cell of an outgoing message: address and room in bytes.
    fn cell(&mut self, stream: Stream) -> Option<(*mut u8, usize)>;
    /// The cell filled last is a piece of `bytes` now.
    fn publish(&mut self, stream: Stream, bytes: usize);
    /// Everything is written; memory comes back when the receiver is done.
    fn close(&mut self, stream: Stream);
    /// Next message that `from` announced and that was not yet taken from the wire.
    fn next(&mut self, from: usize) -> Option<(Mail, Stream)>;
    /// Next piece of an incoming message.
    fn piece(&mut self, from: usize, stream: Stream) -> Option<(*const u8, usize)>;
    /// That piece is read.
    fn release(&mut self, from: usize, stream: Stream);
}
