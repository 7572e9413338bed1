//! Concurrent messages between two ranks.

use std::collections::VecDeque;

use smddp_core::{DType, Options, Work};

use super::BenchGroup;
use crate::buffers::Buffer;
use crate::error::Result;

/// Tag of messages, and tag of the reply to a window of messages.
const TAG: u64 = 0;
const REPLY: u64 = 1;

/// Messages of one size between this rank and a peer.
pub(crate) struct Stream<'a> {
    group: &'a BenchGroup,
    peer: usize,
    bytes: usize,
    out: &'a mut Buffer,
    /// Receive buffer with `slots` consecutive messages.
    into: &'a mut Buffer,
    slots: usize,
}

impl<'a> Stream<'a> {
    /// Messages of `bytes` bytes are sent from the beginning of `out`, and received in the slots of `into`.
    pub(crate) fn new(
        group: &'a BenchGroup,
        peer: usize,
        bytes: usize,
        (out, into): (&'a mut Buffer, &'a mut Buffer),
    ) -> Stream<'a> {
        let slots = into.bytes().len() / bytes.max(1);
        assert!(
            bytes <= out.bytes().len() && slots > 0,
            "the buffers are shorter than a message of {bytes} bytes"
        );
        Stream { group, peer, bytes, out, into, slots }
    }

    pub(crate) fn send(&mut self) -> Result<()> {
        self.window(1, 0)
    }

    pub(crate) fn receive(&mut self) -> Result<()> {
        self.window(0, 1)
    }

    /// Sends and receives these numbers of messages. Starts all sends, and as many receives as there are slots, before the first
    /// wait.
    pub(crate) fn window(&mut self, sends: usize, receives: usize) -> Result<()> {
        let done = self.all(sends, receives);
        self.group.abort_on_error(done)
    }

    fn all(&mut self, sends: usize, receives: usize) -> smddp_core::Result<()> {
        let mut receiving = VecDeque::with_capacity(receives.min(self.slots));
        let mut sending = Vec::with_capacity(sends);
        for number in 0..receives.min(self.slots) {
            receiving.push_back(self.start_receive(number)?);
        }
        for _ in 0..sends {
            sending.push(self.start_send()?);
        }
        for number in self.slots..receives {
            // The oldest receive uses the next slot.
            if let Some(work) = receiving.pop_front() {
                work.wait(None)?;
            }
            receiving.push_back(self.start_receive(number)?);
        }
        receiving.iter().chain(&sending).try_for_each(|work| work.wait(None))
    }

    fn start_receive(&mut self, number: usize) -> smddp_core::Result<Work> {
        let first = number % self.slots * self.bytes;
        let to = self.into.bytes()[first..first + self.bytes].as_mut_ptr();
        // SAFETY: the slot is in a buffer that this value borrows. `all` uses it for one receive at a time and waits for it. On
        // failure `window` aborts the communicator, after which the buffer is not accessed.
        unsafe { self.group.comm.recv(to, self.bytes, DType::U8, Some(self.peer), TAG, Options::default()) }
    }

    fn start_send(&mut self) -> smddp_core::Result<Work> {
        let from = self.out.bytes()[..self.bytes].as_mut_ptr();
        // SAFETY: as for `start_receive`; the buffer of the sends is not written meanwhile.
        unsafe { self.group.comm.send(from, self.bytes, DType::U8, self.peer, TAG, Options::default()) }
    }

    /// Confirms the receipt of a window to the peer with an empty message.
    pub(crate) fn reply(&mut self) -> Result<()> {
        let nowhere = std::ptr::NonNull::dangling().as_ptr();
        // SAFETY: the message is empty.
        let work =
            unsafe { self.group.comm.send(nowhere, 0, DType::U8, self.peer, REPLY, Options::default()) };
        self.group.abort_on_error(work.and_then(|work| work.wait(None)))
    }

    /// Waits for the peer's confirmation.
    pub(crate) fn wait_reply(&mut self) -> Result<()> {
        let nowhere = std::ptr::NonNull::dangling().as_ptr();
        // SAFETY: the message is empty.
        let work = unsafe {
            self.group.comm.recv(nowhere, 0, DType::U8, Some(self.peer), REPLY, Options::default())
        };
        self.group.abort_on_error(work.and_then(|work| work.wait(None)))
    }

    /// Returns the send buffer.
    pub(crate) fn out(&mut self) -> &mut Buffer {
        self.out
    }

    /// Returns the receive buffer.
    pub(crate) fn received(&mut self) -> &mut Buffer {
        self.into
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots
    }
}
