//! Messages between two ranks, many under way at a time.

use std::collections::VecDeque;

use smddp_core::{DType, Options, Work};

use super::Team;
use crate::buffers::Buffer;
use crate::error::Result;

/// Tag of messages, and that of the answers to a window of them.
const TAG: u64 = 0;
const ANSWER: u64 = 1;

/// What this rank and another send each other: messages of one size.
pub(crate) struct Stream<'a> {
    team: &'a Team,
    peer: usize,
    bytes: usize,
    out: &'a mut Buffer,
    /// One message after the other, `slots` of them.
    into: &'a mut Buffer,
    slots: usize,
}

impl<'a> Stream<'a> {
    /// Messages of `bytes` bytes leave from the beginning of `out` and arrive in `into`, in as many slots as it holds.
    pub(crate) fn new(
        team: &'a Team,
        peer: usize,
        bytes: usize,
        (out, into): (&'a mut Buffer, &'a mut Buffer),
    ) -> Stream<'a> {
        let slots = into.bytes().len() / bytes.max(1);
        assert!(bytes <= out.bytes().len() && slots > 0, "no room for a message of {bytes} bytes");
        Stream { team, peer, bytes, out, into, slots }
    }

    pub(crate) fn send(&mut self) -> Result<()> {
        self.window(1, 0)
    }

    pub(crate) fn receive(&mut self) -> Result<()> {
        self.window(0, 1)
    }

    /// Sends and receives so many messages: all are started before any is waited for, receives as far as there are slots.
    pub(crate) fn window(&mut self, sends: usize, receives: usize) -> Result<()> {
        let done = self.all(sends, receives);
        self.team.given_up(done)
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
            // The oldest of them has the slot that comes next.
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
        // SAFETY: the slot lies in a buffer that is borrowed as long as this, which `all` gives to one receive at a time and
        // waits for; when it fails, `window` aborts the communicator, after which nobody touches it.
        unsafe { self.team.comm.recv(to, self.bytes, DType::U8, Some(self.peer), TAG, Options::default()) }
    }

    fn start_send(&mut self) -> smddp_core::Result<Work> {
        let from = self.out.bytes()[..self.bytes].as_mut_ptr();
        // SAFETY: as for `start_receive`; nobody writes what all sends read.
        unsafe { self.team.comm.send(from, self.bytes, DType::U8, self.peer, TAG, Options::default()) }
    }

    /// Tells the other rank that this one has all, with a message of no bytes.
    pub(crate) fn answer(&mut self) -> Result<()> {
        let nowhere = std::ptr::NonNull::dangling().as_ptr();
        // SAFETY: no byte is read.
        let work =
            unsafe { self.team.comm.send(nowhere, 0, DType::U8, self.peer, ANSWER, Options::default()) };
        self.team.given_up(work.and_then(|work| work.wait(None)))
    }

    /// Waits until the other rank says so.
    pub(crate) fn answered(&mut self) -> Result<()> {
        let nowhere = std::ptr::NonNull::dangling().as_ptr();
        // SAFETY: no byte is written.
        let work = unsafe {
            self.team.comm.recv(nowhere, 0, DType::U8, Some(self.peer), ANSWER, Options::default())
        };
        self.team.given_up(work.and_then(|work| work.wait(None)))
    }

    /// What leaves.
    pub(crate) fn out(&mut self) -> &mut Buffer {
        self.out
    }

    /// What arrives.
    pub(crate) fn arrived(&mut self) -> &mut Buffer {
        self.into
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots
    }
}
