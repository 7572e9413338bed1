//! Send and recv: numbered per ordered pair by their order on the wire, matched by tag, outside the collectives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smddp_transport::{Link, Mail, Stream};

use crate::driver::SharedWork;
use crate::error::Error;
use crate::leaving::Ledger;
use crate::reduce;
use crate::types::DType;

/// One send or recv as it was asked for.
pub(crate) struct Post {
    pub(crate) direction: Direction,
    pub(crate) ptr: usize,
    pub(crate) count: usize,
    pub(crate) dtype: DType,
    pub(crate) tag: u64,
    pub(crate) timeout: Duration,
    pub(crate) submitted: Instant,
    pub(crate) work: SharedWork,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Direction {
    To(usize),
    From(usize),
    FromAny,
}

impl std::fmt::Display for Direction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::To(rank) => write!(f, "send to rank {rank}"),
            Self::From(rank) => write!(f, "recv from rank {rank}"),
            Self::FromAny => f.write_str("recv from any rank"),
        }
    }
}

/// A post under way.
struct Active {
    post: Post,
    /// The rank a recv was matched with.
    from: usize,
    stream: Option<Stream>,
    moved: usize,
}

impl Active {
    fn bytes(&self) -> usize {
        self.post.count * self.post.dtype.size()
    }
    fn what(&self) -> String {
        let (count, dtype, tag) = (self.post.count, self.post.dtype.name(), self.post.tag);
        let peer = self.post.direction;
        format!("{peer} ({count} elements of {dtype}, tag {tag})")
    }
}

/// Of a recv from any rank it is known later whose message it took.
fn enter(ledger: &mut Ledger, post: &Post, times: i32) {
    match post.direction {
        Direction::To(rank) => ledger.sent(rank, post.tag, times),
        Direction::From(rank) => ledger.asked(rank, post.tag, times),
        Direction::FromAny => {}
    }
}

pub(crate) struct Mailroom {
    sends: Vec<Active>,
    recvs: Vec<Active>,
    /// Announced, not yet asked for, in the order of each sender.
    unexpected: Vec<(usize, Mail, Stream)>,
    size: usize,
    pub(crate) ledger: Ledger,
}

impl Mailroom {
    pub(crate) fn new(me: usize, size: usize) -> Self {
        let ledger = Ledger::new(me, size);
        Self { sends: Vec::new(), recvs: Vec::new(), unexpected: Vec::new(), size, ledger }
    }

    pub(crate) fn post(&mut self, post: Post) {
        let active = Active { from: 0, stream: None, moved: 0, post };
        enter(&mut self.ledger, &active.post, 1);
        match active.post.direction {
            Direction::To(_) => self.sends.push(active),
            _ => self.recvs.push(active),
        }
    }

    pub(crate) fn pending(&self) -> bool {
        !self.sends.is_empty() || !self.recvs.is_empty()
    }

    /// Whether something here cannot end without `rank`.
    pub(crate) fn needs(&self, rank: usize) -> bool {
        self.sends.iter().any(|a| a.post.direction == Direction::To(rank))
            || self.recvs.iter().any(|a| match a.stream {
                Some(_) => a.from == rank,
                None => a.post.direction == Direction::From(rank),
            })
            || (self.size == 2 && self.recvs.iter().any(|a| a.post.direction == Direction::FromAny))
    }

    pub(crate) fn poll(&mut self, link: &mut dyn Link, group: &str) -> Result<bool, Error> {
        let mut moved = self.send(link);
        moved |= self.collect(link);
        moved |= self.assign(link, group)?;
        moved |= self.receive(link);
        Ok(moved)
    }

    fn send(&mut self, link: &mut dyn Link) -> bool {
        let mut moved = false;
        // Announcements keep their order per receiver; the bytes of different messages may interleave.
        let mut held: Vec<usize> = Vec::new();
        let mut i = 0;
        while i < self.sends.len() {
            let bytes = self.sends[i].bytes();
            let send = &mut self.sends[i];
            let Direction::To(to) = send.post.direction else {
                i += 1;
                continue;
            };
            if send.stream.is_none() && !held.contains(&to) {
                let mail = Mail { tag: send.post.tag, what: send.post.dtype as u64, bytes: bytes as u64 };
                send.stream = link.mail_open(to, mail);
                moved |= send.stream.is_some();
            }
            let Some(stream) = send.stream else {
                held.push(to);
                i += 1;
                continue;
            };
            while send.moved < bytes {
                let Some((cell, room)) = link.mail_cell(stream) else { break };
                let piece = room.min(bytes - send.moved);
                // SAFETY: the cell is ours and has `room` bytes; the buffer holds `bytes` and is valid until the
                // post is over. This thread owns the driver.
                unsafe { reduce::copy(cell, (send.post.ptr + send.moved) as *const u8, piece, false) };
                link.mail_publish(stream, piece);
                send.moved += piece;
                moved = true;
            }
            if send.moved == bytes {
                link.mail_close(stream);
                let send = self.sends.remove(i);
                send.post.work.finish(Ok(()));
            } else {
                i += 1;
            }
        }
        moved
    }

    /// Takes announcements off the wire where some recv may want them.
    fn collect(&mut self, link: &mut dyn Link) -> bool {
        let mut moved = false;
        let any = self.recvs.iter().any(|r| r.stream.is_none() && r.post.direction == Direction::FromAny);
        for from in 0..self.size {
            let wanted = any
                || self.recvs.iter().any(|r| r.stream.is_none() && r.post.direction == Direction::From(from));
            if !wanted || from == link.rank() {
                continue;
            }
            while let Some((mail, stream)) = link.mail_next(from) {
                self.unexpected.push((from, mail, stream));
                moved = true;
            }
        }
        moved
    }

    /// Gives each waiting recv the first message that fits it.
    fn assign(&mut self, link: &dyn Link, group: &str) -> Result<bool, Error> {
        let mut moved = false;
        for recv in self.recvs.iter_mut().filter(|r| r.stream.is_none()) {
            let fits = |&(from, mail, _): &(usize, Mail, Stream)| {
                mail.tag == recv.post.tag
                    && match recv.post.direction {
                        Direction::From(rank) => rank == from,
                        _ => true,
                    }
            };
            let Some(at) = self.unexpected.iter().position(fits) else { continue };
            let (from, mail, stream) = self.unexpected.remove(at);
            if mail.bytes != recv.bytes() as u64 || mail.what != recv.post.dtype as u64 {
                let theirs = DType::from_u8(mail.what as u8);
                let sent = theirs.map_or_else(
                    || format!("{} bytes", mail.bytes),
                    |d| format!("{} elements of {}", mail.bytes / d.size() as u64, d.name()),
                );
                return Err(Error::Mismatch {
                    what: recv.what(),
                    group: group.to_owned(),
                    rank: from,
                    detail: format!("{} sends {sent}, tag {}", link.describe(from), mail.tag),
                });
            }
            if recv.post.direction == Direction::FromAny {
                self.ledger.asked(from, mail.tag, 1);
            }
            recv.from = from;
            recv.stream = Some(stream);
            recv.post.work.set_source(from);
            moved = true;
        }
        Ok(moved)
    }

    fn receive(&mut self, link: &mut dyn Link) -> bool {
        let mut moved = false;
        let mut i = 0;
        while i < self.recvs.len() {
            let bytes = self.recvs[i].bytes();
            let recv = &mut self.recvs[i];
            let Some(stream) = recv.stream else {
                i += 1;
                continue;
            };
            while recv.moved < bytes {
                let Some((piece, room)) = link.mail_piece(recv.from, stream) else { break };
                let length = room.min(bytes - recv.moved);
                // SAFETY: the piece holds `room` bytes until it is released; the buffer has `bytes` and is valid
                // until the post is over. This thread owns the driver.
                unsafe { reduce::copy((recv.post.ptr + recv.moved) as *mut u8, piece, length, false) };
                link.mail_release(recv.from, stream);
                recv.moved += length;
                moved = true;
            }
            if recv.moved == bytes {
                let recv = self.recvs.remove(i);
                recv.post.work.finish(Ok(()));
            } else {
                i += 1;
            }
        }
        moved
    }

    /// Ends posts whose time is up. One that has not begun ends alone; a message cut in the middle ends the group.
    pub(crate) fn expire(&mut self, link: &mut dyn Link, group: &str, now: Instant) -> Result<(), Error> {
        for list in [&mut self.sends, &mut self.recvs] {
            let mut i = 0;
            while i < list.len() {
                let active = &list[i];
                if now.duration_since(active.post.submitted) < active.post.timeout {
                    i += 1;
                    continue;
                }
                let missing = match active.post.direction {
                    Direction::To(rank) | Direction::From(rank) => vec![rank],
                    Direction::FromAny => Vec::new(),
                };
                let detail = match missing.first() {
                    Some(&rank) => format!("nothing came of it; the other side is {}", link.describe(rank)),
                    None => "no rank sent a message with this tag".to_owned(),
                };
                let error = Error::Timeout {
                    what: active.what(),
                    group: group.to_owned(),
                    after: active.post.timeout,
                    missing,
                    detail,
                };
                if active.stream.is_some() {
                    return Err(error);
                }
                let active = list.remove(i);
                enter(&mut self.ledger, &active.post, -1);
                active.post.work.finish(Err(error));
            }
        }
        Ok(())
    }

    pub(crate) fn fail(&mut self, error: &Error) {
        for active in self.sends.drain(..).chain(self.recvs.drain(..)) {
            let work: Arc<_> = active.post.work;
            work.finish(Err(error.clone()));
        }
    }
}
