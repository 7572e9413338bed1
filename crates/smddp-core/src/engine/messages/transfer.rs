//! Transfer of messages: moves their bytes between the callers' buffers and the transport.

use smddp_base::Envelope;
use smddp_group::Group;

use super::MessageQueues;
use crate::call::message_label::Direction;
use crate::kernels;
use crate::observe::recorder::Outcome;

/// Memory through which the bytes of a message move.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum MessageBuffer {
    /// Undecided: the message is not announced or matched yet.
    Unknown,
    /// Slots of the transport.
    Slots,
    /// None: the bytes are sent from, or received in, the caller's buffer.
    InPlace,
}

impl MessageQueues {
    /// Advances pending sends. Returns true if anything moved.
    pub(crate) fn send(&mut self, group: &mut Group) -> bool {
        let mut moved = false;
        // Announcements keep their order per receiver; the bytes of different messages may interleave.
        self.polls += 1;
        self.deferred.resize(if self.sends.is_empty() { 0 } else { self.size }, 0);
        let (poll, deferred, mut messages) = (self.polls, &mut self.deferred, group.messages());
        self.sends.retain_mut(|send| {
            let Direction::To(to) = send.post.direction else { return true };
            let bytes = send.bytes();
            if send.stream.is_none() && deferred[to] != poll {
                let envelope =
                    Envelope { tag: send.post.tag, dtype: send.post.dtype as u64, bytes: bytes as u64 };
                send.stream = messages.announce(to, envelope);
                if send.stream.is_some() {
                    self.announced_to[to] += 1;
                    send.index = self.announced_to[to];
                    self.recorder.begun(send.seq);
                    moved = true;
                }
            }
            let Some(stream) = send.stream else {
                deferred[to] = poll;
                return true;
            };
            if send.buffer == MessageBuffer::Unknown {
                // SAFETY: the buffer is valid and unchanged until the send is over, and its users are released before.
                let in_place =
                    unsafe { messages.carrier(stream).send_in_place(stream, send.post.ptr as *const u8) };
                send.buffer = if in_place { MessageBuffer::InPlace } else { MessageBuffer::Slots };
            }
            if send.buffer == MessageBuffer::InPlace {
                if !messages.carrier(stream).is_sent(stream) {
                    return true;
                }
                (send.moved, moved) = (bytes, true);
            }
            while send.moved < bytes {
                let Some((slot, slot_bytes)) = messages.carrier(stream).send_slot(stream) else {
                    return true;
                };
                let part = slot_bytes.min(bytes - send.moved);
                // SAFETY: this rank owns the slot, which has `slot_bytes` bytes. The buffer holds `bytes` bytes and is
                // valid until the operation is over. This thread owns the engine.
                unsafe { kernels::copy(slot, (send.post.ptr + send.moved) as *const u8, part, false) };
                messages.carrier(stream).publish(stream, part);
                send.moved += part;
                moved = true;
            }
            messages.carrier(stream).close(stream);
            self.recorder.over(send.seq, Outcome::Ok);
            send.post.work.finish(Ok(()));
            false
        });
        moved
    }

    /// Advances matched receives. Returns true if anything moved.
    pub(super) fn receive(&mut self, group: &mut Group) -> bool {
        let (mut moved, mut messages) = (false, group.messages());
        self.recvs.retain_mut(|recv| {
            let bytes = recv.bytes();
            let Some(stream) = recv.stream else { return true };
            if recv.buffer == MessageBuffer::Unknown {
                // SAFETY: the buffer has room for the message until the recv is over, and its users are released before.
                let in_place =
                    unsafe { messages.carrier(stream).receive_into(stream, recv.post.ptr as *mut u8) };
                recv.buffer = if in_place { MessageBuffer::InPlace } else { MessageBuffer::Slots };
            }
            if recv.buffer == MessageBuffer::InPlace {
                if !messages.carrier(stream).is_received(stream) {
                    return true;
                }
                recv.moved = bytes;
            }
            while recv.moved < bytes {
                let Some((part, slot_bytes)) = messages.carrier(stream).recv_slot(stream) else {
                    return true;
                };
                let length = slot_bytes.min(bytes - recv.moved);
                // SAFETY: the slot holds `slot_bytes` bytes until it is released. The buffer has `bytes` bytes and is
                // valid until the operation is over. This thread owns the engine.
                unsafe { kernels::copy((recv.post.ptr + recv.moved) as *mut u8, part, length, false) };
                messages.carrier(stream).release(stream);
                recv.moved += length;
                moved = true;
            }
            moved = true;
            messages.carrier(stream).confirm(stream);
            self.recorder.over(recv.seq, Outcome::Ok);
            recv.post.work.finish(Ok(()));
            false
        });
        moved
    }
}
