//! Steps of a message at its sender and its receiver.

use smddp_base::{Envelope, MessageId, MessageTransport};
use smddp_net::frame::{Frame, Kind};
use smddp_net::wire::Payload;

use super::{
    EAGER_CREDIT, EAGER_LIMIT, FRAGMENT, MAX_IN_FLIGHT, QueuedMessage, RecvTarget, RemoteMessages,
    SendingMessage, queue_control,
};

impl MessageTransport for RemoteMessages {
    fn announce(&mut self, to: usize, envelope: Envelope) -> Option<MessageId> {
        let stream = self.next;
        self.next += 1;
        let eager =
            envelope.bytes as usize <= EAGER_LIMIT && self.unreceived[to] + envelope.bytes <= EAGER_CREDIT;
        if eager {
            self.unreceived[to] += envelope.bytes;
            self.short_sent[to] = true;
        }
        self.outgoing.insert(
            stream,
            SendingMessage {
                to,
                bytes: envelope.bytes as usize,
                eager,
                region: None,
                source: None,
                granted: u64::from(eager),
                sent: 0,
                busy: [0; MAX_IN_FLIGHT as usize],
                closed: false,
            },
        );
        let frame = Frame {
            index: if eager { Frame::FOLLOWS } else { 0 },
            what: envelope.dtype,
            count: envelope.tag,
            total: envelope.bytes,
            ..Frame::new(Kind::Announce, stream)
        };
        queue_control(&mut self.due, to, frame);
        Some(MessageId::remote(to, stream))
    }

    fn send_slot(&mut self, MessageId { number: stream, .. }: MessageId) -> Option<(*mut u8, usize)> {
        let out = self.outgoing.get_mut(&stream)?;
        let slot = (out.sent % MAX_IN_FLIGHT) as usize;
        if out.sent >= out.granted || out.busy[slot] > 0 {
            return None;
        }
        if out.region.is_none() {
            out.region =
                self.staging.take(if out.eager { out.bytes } else { MAX_IN_FLIGHT as usize * FRAGMENT });
        }
        if out.eager {
            return Some((self.staging.address(out.region.as_ref()?), out.bytes));
        }
        Some((self.staging.address(out.region.as_ref()?).wrapping_add(slot * FRAGMENT), FRAGMENT))
    }

    fn publish(&mut self, MessageId { number: stream, .. }: MessageId, bytes: usize) {
        if let Some(out) = self.outgoing.get_mut(&stream)
            && let Some(region) = &out.region
        {
            let slot = out.sent % MAX_IN_FLIGHT;
            let payload = self.staging.address(region).wrapping_add(slot as usize * FRAGMENT).cast_const();
            let frame = Frame { index: out.sent, bytes: bytes as u64, ..Frame::new(Kind::Fragment, stream) };
            out.sent += 1;
            out.busy[slot as usize] += 1;
            self.due.push_back(QueuedMessage {
                to: out.to,
                frame,
                payload: Payload::Borrowed { at: payload, ticket: stream << 8 | slot },
            });
        }
    }

    unsafe fn send_in_place(&mut self, MessageId { number: stream, .. }: MessageId, at: *const u8) -> bool {
        let Some(out) = self.outgoing.get_mut(&stream).filter(|out| self.in_place && out.bytes > 0) else {
            return false;
        };
        if out.eager {
            // The send completes at once, whether or not the reader has memory for it.
            out.sent = 1;
            let frame = Frame { bytes: out.bytes as u64, ..Frame::new(Kind::Fragment, stream) };
            self.due.push_back(QueuedMessage { to: out.to, frame, payload: Payload::Copied { at } });
        } else {
            out.source = Some(at);
        }
        true
    }

    fn is_sent(&mut self, MessageId { number: stream, .. }: MessageId) -> bool {
        let Some(out) = self.outgoing.get_mut(&stream) else { return true };
        let Some(at) = out.source else { return true };
        let fragments = out.bytes.div_ceil(FRAGMENT) as u64;
        while out.sent < out.granted.min(fragments) && out.busy[(out.sent % MAX_IN_FLIGHT) as usize] == 0 {
            let (slot, from) = (out.sent % MAX_IN_FLIGHT, out.sent as usize * FRAGMENT);
            let bytes = (out.bytes - from).min(FRAGMENT) as u64;
            let frame = Frame { index: out.sent, bytes, ..Frame::new(Kind::Fragment, stream) };
            (out.sent, out.busy[slot as usize]) = (out.sent + 1, 1);
            let payload = at.wrapping_add(from);
            self.due.push_back(QueuedMessage {
                to: out.to,
                frame,
                payload: Payload::Borrowed { at: payload, ticket: stream << 8 | slot },
            });
        }
        out.sent == fragments && out.busy.iter().all(|&busy| busy == 0)
    }

    fn close(&mut self, MessageId { number: stream, .. }: MessageId) {
        if let Some(out) = self.outgoing.get_mut(&stream) {
            out.closed = true;
        }
        self.remove_finished(stream);
    }

    fn next_announced(&mut self, from: usize) -> Option<(Envelope, MessageId)> {
        let found = self.announced[from].pop_front();
        self.waiting[from] = found.is_none();
        self.waiting_any = found.is_none();
        found
    }

    unsafe fn receive_into(&mut self, message: MessageId, at: *mut u8) -> bool {
        let Some(incoming) = self.incoming.get_mut(&message) else { return false };
        if !self.in_place || incoming.region.is_some() {
            return false;
        }
        incoming.recv_target = Some(RecvTarget::At(at));
        if !incoming.eager {
            let granted = Frame { index: incoming.fragments(), ..Frame::new(Kind::Grant, message.number) };
            queue_control(&mut self.due, message.peer, granted);
        }
        true
    }

    fn is_received(&mut self, message: MessageId) -> bool {
        let Some(incoming) = self.incoming.get(&message) else { return true };
        if incoming.received < incoming.fragments() {
            return false;
        }
        if incoming.eager {
            self.return_credit(message.peer, incoming.bytes as u64);
        }
        self.incoming.remove(&message);
        true
    }

    fn recv_slot(&mut self, message: MessageId) -> Option<(*const u8, usize)> {
        let incoming = self.incoming.get_mut(&message)?;
        if !incoming.eager && incoming.region.is_none() {
            incoming.region = self.staging.take(MAX_IN_FLIGHT as usize * FRAGMENT);
            incoming.region.as_ref()?;
            let granted = Frame { index: MAX_IN_FLIGHT, ..Frame::new(Kind::Grant, message.number) };
            queue_control(&mut self.due, message.peer, granted);
        }
        if incoming.received <= incoming.released {
            return None;
        }
        if incoming.eager {
            return Some((self.staging.address(incoming.region.as_ref()?).cast_const(), incoming.bytes));
        }
        let slot = (incoming.released % MAX_IN_FLIGHT) as usize * FRAGMENT;
        Some((self.staging.address(incoming.region.as_ref()?).wrapping_add(slot).cast_const(), FRAGMENT))
    }

    fn release(&mut self, message: MessageId) {
        let Some(incoming) = self.incoming.get_mut(&message) else { return };
        incoming.released += 1;
        let (bytes, eager, over) =
            (incoming.bytes as u64, incoming.eager, incoming.released >= incoming.fragments());
        if !eager && incoming.released + MAX_IN_FLIGHT <= incoming.fragments() {
            let granted =
                Frame { index: incoming.released + MAX_IN_FLIGHT, ..Frame::new(Kind::Grant, message.number) };
            queue_control(&mut self.due, message.peer, granted);
        }
        if over && let Some(region) = self.incoming.remove(&message).and_then(|i| i.region) {
            self.staging.give(region);
        }
        if eager {
            self.return_credit(message.peer, bytes);
        }
    }

    /// A long message is sent once its receiver has a recv for it.
    fn is_confirmed(&self, to: usize) -> bool {
        !self.short_sent[to] && self.outgoing.values().all(|out| out.to != to)
    }
}
