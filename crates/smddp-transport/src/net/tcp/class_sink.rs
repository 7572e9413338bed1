//! What a connection's frames say of the connection itself; everything else is the sink's.

use crate::net::frame::{Frame, Kind};
use crate::net::wire::{Sink, Target, Ticket};

/// Notes who says goodbye, and hands everything on.
pub(super) struct ClassSink<'a> {
    sink: &'a mut dyn Sink,
    class: usize,
    /// Something came that no rank sends here: nothing more is taken from this connection.
    pub(super) wrong: bool,
    /// Anything came besides `Move` and `Moved`.
    pub(super) heard: bool,
    pub(super) left: bool,
    /// Its last frame over the connection that it turned from was heard: over this one, or before.
    pub(super) moves: bool,
    moved: bool,
}

impl<'a> ClassSink<'a> {
    pub(super) fn new(sink: &'a mut dyn Sink, class: usize, moved: bool) -> Self {
        Self { sink, class, wrong: false, heard: false, left: false, moves: false, moved }
    }

    fn refuse(&mut self) -> Target {
        self.wrong = true;
        Target::Later
    }
}

impl Sink for ClassSink<'_> {
    fn place(&mut self, peer: usize, frame: &Frame) -> Target {
        match frame.kind {
            Kind::Moved | Kind::Move if frame.bytes > 0 => self.refuse(),
            Kind::Moved if !self.moved => Target::Later,
            Kind::Moved | Kind::Move => Target::Drop,
            // The order of its class is all that a frame can rely on.
            _ if frame.class() != self.class => self.refuse(),
            _ => self.sink.place(peer, frame),
        }
    }
    fn arrived(&mut self, peer: usize, frame: &Frame) {
        match frame.kind {
            Kind::Move => self.moves = true,
            Kind::Moved => {}
            kind => {
                self.heard = true;
                self.left |= kind == Kind::Leave;
                self.sink.arrived(peer, frame);
            }
        }
    }
    fn sent(&mut self, ticket: Ticket) {
        self.sink.sent(ticket);
    }
}
