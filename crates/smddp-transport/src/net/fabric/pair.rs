//! What one rank sends to another, put back in order.

use std::collections::{BTreeMap, VecDeque};
use std::ops::RangeInclusive;

use super::header::{HeaderKind, numbers};
use super::rail::RemoteMemory;
use crate::net::frame::{CLASSES, Frame, HEADER};
use crate::net::wire::INLINE_PAYLOAD;

/// A payload in the sender's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Offered {
    /// The sender's number for it.
    pub(crate) id: u64,
    /// The sender's device writes; then the largest of its writes, bytes.
    pub(crate) writes: Option<usize>,
    /// Where it lies, by the sender's rails.
    pub(crate) at: Vec<RemoteMemory>,
}

impl Offered {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let head = [self.id, self.writes.map_or(0, |w| w as u64)];
        let places = self.at.iter().flat_map(|r| [r.address, r.key]);
        head.into_iter().chain(places).flat_map(u64::to_le_bytes).collect()
    }

    fn decode(body: &[u8]) -> Option<Self> {
        let mut words = numbers(body);
        let (id, writes) = (words.next()?, words.next()? as usize);
        let at = remotes(words);
        (!at.is_empty()).then_some(Self { id, writes: (writes > 0).then_some(writes), at })
    }
}

/// Addresses and keys, one pair behind the other.
pub(crate) fn remotes(mut words: impl Iterator<Item = u64>) -> Vec<RemoteMemory> {
    let pair = move || Some(RemoteMemory { address: words.next()?, key: words.next()? });
    std::iter::from_fn(pair).collect()
}

/// Bytes of an offered payload: anything less goes with its frame, and no memory is larger.
const OFFERED: RangeInclusive<u64> = INLINE_PAYLOAD as u64 + 1..=1 << 40;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Payload {
    Here(Vec<u8>),
    There(Offered),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Has no place yet.
    Waiting,
    /// So many operations bring it to its place.
    Moving(usize),
    /// Lies in its place.
    Placed,
}

/// A frame that is here and not yet delivered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Item {
    /// Unique in its pair.
    pub(crate) seq: u64,
    pub(crate) frame: Frame,
    pub(crate) payload: Payload,
    pub(crate) stage: Arrival,
}

/// The receiving end of an ordered pair: its messages have one order, and what they bring is delivered class by class.
#[derive(Default)]
pub(crate) struct Pair {
    /// Number of the message to be taken next.
    next: u64,
    /// Messages that came too early. Bounded by the credits of their sender.
    ahead: BTreeMap<u64, (HeaderKind, Vec<u8>)>,
    /// A frame whose payload is not all here.
    partial: Option<Item>,
    /// Frames of each class, in order. What waits here is bounded by what the owner of the wire lets its peers send.
    pub(crate) classes: [VecDeque<Item>; CLASSES],
    /// Whether the group knows that there is something.
    pub(crate) listed: bool,
}

impl Pair {
    /// Whether a message with this number, that holds the whole of this frame, can be delivered at once.
    pub(crate) fn idle(&self, seq: u64, frame: &Frame) -> bool {
        let nothing = self.classes.get(frame.class()).is_some_and(VecDeque::is_empty);
        self.next == seq && self.partial.is_none() && nothing && self.ahead.is_empty()
    }

    /// Whether all that came was delivered.
    pub(crate) fn is_empty(&self) -> bool {
        self.classes.iter().all(VecDeque::is_empty)
    }

    /// Such a message was delivered.
    pub(crate) fn skip(&mut self) {
        self.next += 1;
    }

    /// Takes a message; `Err`: it cannot be part of this pair's stream.
    pub(crate) fn take(&mut self, what: HeaderKind, seq: u64, body: &[u8]) -> Result<(), String> {
        if seq > self.next {
            return match self.ahead.insert(seq, (what, body.to_vec())) {
                None => Ok(()),
                Some(_) => Err(format!("message {seq} came twice")),
            };
        }
        if seq < self.next {
            return Err(format!("message {seq} came again after {}", self.next));
        }
        self.append(what, seq, body)?;
        self.next += 1;
        while let Some(entry) = self.ahead.first_entry()
            && *entry.key() == self.next
        {
            let (seq, (what, body)) = entry.remove_entry();
            self.append(what, seq, &body)?;
            self.next += 1;
        }
        Ok(())
    }

    /// Takes a message as if it were the next one, which is what must not be done.
    #[cfg(test)]
    pub(crate) fn take_unordered(&mut self, what: HeaderKind, seq: u64, body: &[u8]) -> Result<(), String> {
        self.append(what, seq, body)
    }

    fn append(&mut self, what: HeaderKind, seq: u64, body: &[u8]) -> Result<(), String> {
        if what == HeaderKind::More {
            let Some(item) = &mut self.partial else { return Err("a payload without a frame".to_owned()) };
            let Payload::Here(bytes) = &mut item.payload else { return Err("two payloads".to_owned()) };
            bytes.extend_from_slice(body);
            if bytes.len() as u64 > item.frame.bytes {
                return Err("more payload than its frame says".to_owned());
            }
        } else {
            if self.partial.is_some() {
                return Err("a frame inside another".to_owned());
            }
            let (frame, rest) = split(body).ok_or("no frame")?;
            if frame.class() >= CLASSES {
                return Err(format!("a frame of class {}", frame.class()));
            }
            let payload = if what == HeaderKind::TransportOffer {
                if !OFFERED.contains(&frame.bytes) {
                    return Err(format!("an offer of {} bytes", frame.bytes));
                }
                Payload::There(Offered::decode(rest).ok_or("an offer without an address")?)
            } else {
                Payload::Here(rest.to_vec())
            };
            self.partial = Some(Item { seq, frame, payload, stage: Arrival::Waiting });
        }
        let whole = |item: &mut Item| match &item.payload {
            Payload::Here(bytes) => bytes.len() as u64 == item.frame.bytes,
            Payload::There(_) => true,
        };
        if let Some(item) = self.partial.take_if(whole) {
            self.classes[item.frame.class()].push_back(item);
        }
        Ok(())
    }

    /// One operation of a frame on its way is over.
    pub(crate) fn moved(&mut self, seq: u64) -> Option<&mut Item> {
        let item = self.classes.iter_mut().flatten().find(|item| item.seq == seq)?;
        if let Arrival::Moving(left) = item.stage {
            item.stage = if left > 1 { Arrival::Moving(left - 1) } else { Arrival::Placed };
        }
        Some(item)
    }
}

/// A frame and what follows it in a message.
pub(crate) fn split(body: &[u8]) -> Option<(Frame, &[u8])> {
    let (head, rest) = body.split_first_chunk::<HEADER>()?;
    Some((Frame::decode(head)?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::frame::Kind;

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
                let (what, body) = &messages[seq];
                pair.take(*what, seq as u64, body).unwrap();
            }
            let found: Vec<_> = pair.classes[0].iter().map(|i| (i.frame.index, &i.payload)).collect();
            let want: Vec<_> =
                [&b"ab"[..], b"cdefg", b""].map(|p| Payload::Here(p.to_vec())).into_iter().collect();
            assert_eq!(found, want.iter().enumerate().map(|(i, p)| (i as u64, p)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_is_no_stream_is_refused() {
        let mut pair = Pair::default();
        assert!(pair.take(HeaderKind::More, 0, b"x").is_err());
        assert!(pair.take(HeaderKind::First, 0, b"no frame").is_err());
        let mut pair = Pair::default();
        pair.take(HeaderKind::First, 0, &body(0, b"", 0)).unwrap();
        assert!(pair.take(HeaderKind::First, 0, &body(0, b"", 0)).is_err(), "twice");
        assert!(pair.take(HeaderKind::TransportOffer, 1, &body(0, b"12345678", 9)).is_err(), "no address");
    }
}
