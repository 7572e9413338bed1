//! What a connection's frames say of the connection itself; everything else is the sink's.

use crate::net::frame::{Frame, Kind};
use crate::net::wire::{Sink, Target, Ticket};

/// Notes who says goodbye, and hands everything on.
pub(super) struct ClassSink<'a> {
    sink: &'a mut dyn Sink,
    class: usize,
    /// Something came that no rank sends here: nothing more is taken from this connection.
    pub(super) malformed: bool,
    /// Anything came besides `Move` and `Moved`.
    pub(super) received_any: bool,
    pub(super) left: bool,
    /// Its last frame over the connection that it turned from was heard: over this one, or before.
    pub(super) peer_moved: bool,
    may_move: bool,
}

impl<'a> ClassSink<'a> {
    pub(super) fn new(sink: &'a mut dyn Sink, class: usize, may_move: bool) -> Self {
        Self { sink, class, malformed: false, received_any: false, left: false, peer_moved: false, may_move }
    }

    fn reject(&mut self) -> Target {
        self.malformed = true;
        Target::Later
    }
}

impl Sink for ClassSink<'_> {
    fn target(&mut self, peer: usize, frame: &Frame) -> Target {
        match frame.kind {
            Kind::Moved | Kind::Move if frame.bytes > 0 => self.reject(),
            Kind::Moved if !self.may_move => Target::Later,
            Kind::Moved | Kind::Move => Target::Discard,
            // The order of its class is all that a frame can rely on.
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
