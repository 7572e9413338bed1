//! Reordering of messages from one rank to another.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

use smddp_net::frame::{CLASSES, Frame, HEADER};
use smddp_net::wire::INLINE_PAYLOAD;

use super::header::{HeaderKind, integers};
use super::rail::RemoteMemory;

/// Payload in the sender's memory, offered to the receiver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offered {
    /// Id assigned by the sender.
    pub(crate) id: u64,
    /// Largest write of the sender's device in bytes, if it supports native writes.
    pub(crate) writes: Option<usize>,
    /// Remote memory of the payload, by the sender's rails.
    pub(crate) at: Vec<RemoteMemory>,
}

impl Offered {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let head = [self.id, self.writes.map_or(0, |w| w as u64)];
        let regions = self.at.iter().flat_map(|r| [r.address, r.key]);
        head.into_iter().chain(regions).flat_map(u64::to_le_bytes).collect()
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let mut values = integers(body);
        let (id, writes) = (values.next()?, values.next()? as usize);
        let at = remotes(values);
        (!at.is_empty()).then_some(Self { id, writes: (writes > 0).then_some(writes), at })
    }
}

/// Decodes consecutive pairs of address and key.
pub(crate) fn remotes(mut values: impl Iterator<Item = u64>) -> Vec<RemoteMemory> {
    let pair = move || Some(RemoteMemory { address: values.next()?, key: values.next()? });
    std::iter::from_fn(pair).collect()
}

/// Valid sizes of an offered payload, in bytes: smaller payloads are sent inline, and no memory is larger.
const OFFERED: RangeInclusive<u64> = INLINE_PAYLOAD as u64 + 1..=1 << 40;

/// Payload of a received frame.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    Inline(Vec<u8>),
    Remote(Offered),
}

/// Delivery stage of a received frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// The frame has no target yet.
    Waiting,
    /// The given number of operations transfer the payload to its target.
    Transferring(usize),
    /// The payload is in its target.
    Placed,
}

/// Received frame that is not delivered yet.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PendingFrame {
    /// Sequence number, unique in its pair.
    pub(crate) seq: u64,
    pub(crate) frame: Frame,
    pub(crate) payload: Payload,
    pub(crate) stage: Arrival,
    /// Offset of a fetched payload in the staging memory, in bytes.
    pub(crate) offset: Option<usize>,
}

/// Receiving end of an ordered pair: its messages have one order; their frames are delivered class by class.
#[derive(Default)]
pub(crate) struct Pair {
    /// Sequence number of the next message in order.
    next: u64,
    /// Messages that arrived early; the credits of their sender bound their number.
    out_of_order: BTreeMap<u64, (HeaderKind, Vec<u8>)>,
    /// Frame whose payload is incomplete.
    partial: Option<PendingFrame>,
    /// Complete frames of each class, in order. The sink's flow control bounds their number.
    pub(crate) classes: [VecDeque<PendingFrame>; CLASSES],
    /// Set while the pair is in its group's list of waiting pairs.
    pub(crate) listed: bool,
}

impl Pair {
    /// Returns true if a message with this number, which contains the whole frame, can be delivered at once.
    pub(crate) fn is_idle(&self, seq: u64, frame: &Frame) -> bool {
        let nothing = self.classes.get(frame.class()).is_some_and(VecDeque::is_empty);
        self.next == seq && self.partial.is_none() && nothing && self.out_of_order.is_empty()
    }

    /// Returns true if all received frames are delivered.
    pub(crate) fn is_empty(&self) -> bool {
        self.classes.iter().all(VecDeque::is_empty)
    }

    /// Advances past a message that was delivered at once.
    pub(crate) fn advance(&mut self) {
        self.next += 1;
    }

    /// Accepts a message; `Err`: it cannot be part of this pair's stream.
    pub(crate) fn accept(&mut self, kind: HeaderKind, seq: u64, body: &[u8]) -> Result<(), String> {
        if seq > self.next {
            return match self.out_of_order.insert(seq, (kind, body.to_vec())) {
                None => Ok(()),
                Some(_) => Err(format!("message {seq} was received twice")),
            };
        }
        if seq < self.next {
            return Err(format!("message {seq} was received again after {}", self.next));
        }
        self.append(kind, seq, body)?;
        self.next += 1;
        while let Some(entry) = self.out_of_order.first_entry()
            && *entry.key() == self.next
        {
            let (seq, (kind, body)) = entry.remove_entry();
            self.append(kind, seq, &body)?;
            self.next += 1;
        }
        Ok(())
    }

    /// Accepts a message as if it were the next one: an injected error.
    #[cfg(test)]
    pub(crate) fn accept_unordered(&mut self, kind: HeaderKind, seq: u64, body: &[u8]) -> Result<(), String> {
        self.append(kind, seq, body)
    }

    fn append(&mut self, kind: HeaderKind, seq: u64, body: &[u8]) -> Result<(), String> {
        if kind == HeaderKind::More {
            let Some(item) = &mut self.partial else { return Err("a payload without a frame".to_owned()) };
            let Payload::Inline(bytes) = &mut item.payload else {
                return Err("two payloads for one frame".to_owned());
            };
            bytes.extend_from_slice(body);
            if bytes.len() as u64 > item.frame.bytes {
                return Err("a payload longer than its frame announced".to_owned());
            }
        } else {
            if self.partial.is_some() {
                return Err("a frame before the end of the previous frame".to_owned());
            }
            let (frame, rest) = split(body).ok_or("a message without a frame")?;
            if frame.class() >= CLASSES {
                return Err(format!("a frame of class {}", frame.class()));
            }
            let payload = if kind == HeaderKind::Offer {
                if !OFFERED.contains(&frame.bytes) {
                    return Err(format!("an offer of {} bytes", frame.bytes));
                }
                Payload::Remote(Offered::decode(rest).ok_or("an offer without an address")?)
            } else {
                Payload::Inline(rest.to_vec())
            };
            self.partial = Some(PendingFrame { seq, frame, payload, stage: Arrival::Waiting, offset: None });
        }
        let whole = |item: &mut PendingFrame| match &item.payload {
            Payload::Inline(bytes) => bytes.len() as u64 == item.frame.bytes,
            Payload::Remote(_) => true,
        };
        if let Some(item) = self.partial.take_if(whole) {
            self.classes[item.frame.class()].push_back(item);
        }
        Ok(())
    }

    /// Records the completion of one operation of a frame's transfer.
    pub(crate) fn transfer_completed(&mut self, seq: u64) -> Option<&mut PendingFrame> {
        let item = self.classes.iter_mut().flatten().find(|item| item.seq == seq)?;
        if let Arrival::Transferring(remaining) = item.stage {
            item.stage = if remaining > 1 { Arrival::Transferring(remaining - 1) } else { Arrival::Placed };
        }
        Some(item)
    }
}

/// Splits a message body into a frame and the rest.
pub(crate) fn split(body: &[u8]) -> Option<(Frame, &[u8])> {
    let (head, rest) = body.split_first_chunk::<HEADER>()?;
    Some((Frame::decode(head)?, rest))
}

#[cfg(test)]
mod tests {
    use smddp_net::frame::Kind;

    use super::*;

    fn body(index: u64, payload: &[u8], bytes: usize) -> Vec<u8> {
        let frame = Frame { index, bytes: bytes as u64, ..Frame::new(Kind::Data, 1) };
        [&frame.encode()[..], payload].concat()
    }

    #[test]
    fn messages_in_any_order_become_frames_in_order() {
        let messages = [
            (HeaderKind::First, body(0, b"ab", 2)),
            (HeaderKind::First, body(1, b"cd", 5)),
            (HeaderKind::More, b"efg".to_vec()),
            (HeaderKind::First, body(2, b"", 0)),
        ];
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]] {
            let mut pair = Pair::default();
            for seq in order {
                let (kind, body) = &messages[seq];
                pair.accept(*kind, seq as u64, body).unwrap();
            }
            let found: Vec<_> = pair.classes[0].iter().map(|i| (i.frame.index, &i.payload)).collect();
            let want: Vec<_> =
                [&b"ab"[..], b"cdefg", b""].map(|p| Payload::Inline(p.to_vec())).into_iter().collect();
            assert_eq!(found, want.iter().enumerate().map(|(i, p)| (i as u64, p)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn malformed_streams_are_rejected() {
        let mut pair = Pair::default();
        assert!(pair.accept(HeaderKind::More, 0, b"x").is_err());
        assert!(pair.accept(HeaderKind::First, 0, b"no frame").is_err());
        let mut pair = Pair::default();
        pair.accept(HeaderKind::First, 0, &body(0, b"", 0)).unwrap();
        assert!(pair.accept(HeaderKind::First, 0, &body(0, b"", 0)).is_err(), "the same number twice");
        assert!(pair.accept(HeaderKind::Offer, 1, &body(0, b"12345678", 9)).is_err(), "no address");
    }
}
