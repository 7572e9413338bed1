//! Sink of one connection: handles the frames about the connection itself, and forwards all other frames.

use smddp_net::frame::{Frame, Kind};
use smddp_net::wire::{Sink, Target, Ticket};

/// Records leave and switch frames of one connection, and forwards all other frames to the wire's sink.
pub(super) struct ClassSink<'a> {
    sink: &'a mut dyn Sink,
    class: usize,
    /// An invalid frame arrived: the connection receives nothing more.
    pub(super) malformed: bool,
    /// A frame other than `Move` and `Moved` arrived.
    pub(super) received_any: bool,
    /// The peer's `Leave` frame arrived.
    pub(super) left: bool,
    /// The peer's `Move` frame arrived: its last frame over this connection.
    pub(super) peer_moved: bool,
    /// The peer's `Move` frame arrived earlier, over its other connection. `Moved` waits for it, to keep the frames in
    /// order.
    move_received: bool,
}

impl<'a> ClassSink<'a> {
    pub(super) fn new(sink: &'a mut dyn Sink, class: usize, move_received: bool) -> Self {
        Self {
            sink,
            class,
            malformed: false,
            received_any: false,
            left: false,
            peer_moved: false,
            move_received,
        }
    }

    fn reject(&mut self) -> Target {
        self.malformed = true;
        Target::Later
    }
}

// SAFETY: all target addresses are those of `sink`, which also receives each frame that has one.
unsafe impl Sink for ClassSink<'_> {
    fn target(&mut self, peer: usize, frame: &Frame) -> Target {
        match frame.kind {
            Kind::Moved | Kind::Move if frame.bytes > 0 => self.reject(),
            Kind::Moved if !self.move_received => Target::Later,
            Kind::Moved | Kind::Move => Target::Discard,
            // Frames are ordered within a class only, so a frame of another class is invalid here.
            _ if frame.class() != self.class => self.reject(),
            _ => self.sink.target(peer, frame),
        }
    }
    fn received(&mut self, peer: usize, frame: &Frame) {
        match frame.kind {
            Kind::Move => self.peer_moved = true,
            Kind::Moved => {}
            kind => {
                self.received_any = true;
                self.left |= kind == Kind::Leave;
                self.sink.received(peer, frame);
            }
        }
    }
    fn sent(&mut self, ticket: Ticket) {
        self.sink.sent(ticket);
    }
}
