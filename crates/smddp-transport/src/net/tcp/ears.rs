//! What a connection's frames say of the connection itself; everything else is the sink's.

use crate::net::frame::{Frame, Kind};
use crate::net::wire::{Place, Sink, Ticket};

/// Notes who says goodbye, and hands everything on.
pub(super) struct Ears<'a> {
    sink: &'a mut dyn Sink,
    lane: usize,
    /// Something came that no rank sends here: nothing more is taken from this connection.
    pub(super) wrong: bool,
    /// Anything came besides `Move` and `Moved`.
    pub(super) heard: bool,
    pub(super) left: bool,
    /// Its last frame over the connection that it turned from was heard: over this one, or before.
    pub(super) moves: bool,
    moved: bool,
}

impl<'a> Ears<'a> {
    pub(super) fn new(sink: &'a mut dyn Sink, lane: usize, moved: bool) -> Self {
        Self { sink, lane, wrong: false, heard: false, left: false, moves: false, moved }
    }

    fn refuse(&mut self) -> Place {
        self.wrong = true;
        Place::Later
    }
}

impl Sink for Ears<'_> {
    fn place(&mut self, peer: usize, frame: &Frame) -> Place {
        match frame.kind {
            Kind::Moved | Kind::Move if frame.bytes > 0 => self.refuse(),
            Kind::Moved if !self.moved => Place::Later,
            Kind::Moved | Kind::Move => Place::Drop,
            // The order of its lane is all that a frame can rely on.
            _ if frame.lane() != self.lane => self.refuse(),
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
