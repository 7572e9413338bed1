//! The link of a group that spans nodes.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use super::route::{In, Map, Out, Routes};
use crate::board::{Board, Lent, Maker};
use crate::net::link::Net;
use crate::shm::ShmLink;
use crate::{Fault, Head, Link, Mail, Mismatch, Sleeper, Stream, Wiring};

pub(super) struct JointLink {
    me: usize,
    map: Map,
    /// "rank 3 (host h1, pid 812)", by rank.
    names: Vec<String>,
    shm: ShmLink,
    net: Net,
    /// Of the operation begun last.
    routes: Arc<Routes>,
    /// The cell lent last, by channel, where a message goes both ways.
    lent: Vec<Option<(*mut u8, *mut u8)>>,
}

/// The board of this rank's node, by ranks of the group.
struct NodeBoard {
    local: Vec<Option<usize>>,
    board: Arc<dyn Board>,
}

impl Board for NodeBoard {
    fn page(&self, rank: usize) -> Option<*mut u8> {
        self.board.page(self.local[rank]?)
    }

    fn keep(&self) {
        self.board.keep();
    }

    fn lend(&self, maker: Maker) -> u64 {
        self.board.lend(maker)
    }

    fn withdraw(&self, token: u64) {
        self.board.withdraw(token);
    }

    fn borrow(&self, rank: usize, token: u64) -> io::Result<Lent> {
        let local = self.local[rank].ok_or_else(|| io::Error::other("it is on another node"))?;
        self.board.borrow(local, token)
    }
}

// SAFETY: `lent` holds addresses of cells that this link owns; one thread at a time owns the link.
unsafe impl Send for JointLink {}

/// Streams with this bit are the wire's.
const NET: Stream = 1 << 63;

impl JointLink {
    pub(super) fn new(me: usize, map: Map, names: Vec<String>, shm: ShmLink, net: Net) -> Self {
        Self { me, map, names, shm, net, routes: Arc::default(), lent: Vec::new() }
    }

    fn far_ranks(&self) -> Vec<usize> {
        (0..self.map.size()).filter(|&rank| self.map.local(rank).is_none()).collect()
    }

    fn globally(&self, found: Mismatch) -> Mismatch {
        Mismatch { rank: self.map.rank(found.rank), ..found }
    }
}

impl Link for JointLink {
    fn rank(&self) -> usize {
        self.me
    }

    fn size(&self) -> usize {
        self.map.size()
    }

    /// Slots reach the ranks of one node only.
    fn slot_bytes(&self) -> usize {
        0
    }

    fn turn(&mut self) -> bool {
        self.net.turn()
    }

    fn busy(&self) -> bool {
        self.net.busy()
    }

    fn begin(&mut self, seq: u64, head: Head, wiring: &Wiring) -> bool {
        // All that it needs may be here already; a group that is known to be dead does nothing more.
        if self.net.differs() || self.net.troubled(seq) {
            return false;
        }
        let routes = wiring.ways.0.get_or_init(|| {
            // A writer needs cells for its own work alone where the wire copies what is on its way.
            let written = if self.net.copies() { wiring.window.min(wiring.depth.0) } else { wiring.window };
            Arc::new(Routes::new(self.me, &self.map, wiring, written))
        });
        if !Arc::ptr_eq(&self.routes, routes) {
            self.net.wire_up(&routes.net);
            self.lent.clear();
            self.lent.resize(routes.outs.len(), None);
            self.routes = routes.clone();
        }
        if !self.net.reserve() || !self.shm.begin(seq, head, &self.routes.shm) {
            return false;
        }
        self.net.begin(seq, head);
        true
    }

    fn cell(&mut self, channel: usize) -> Option<*mut u8> {
        match self.routes.outs[channel] {
            Out { shm: true, net: None } => self.shm.cell(channel),
            Out { shm: true, net: Some(net) } => {
                let (far, near) = (self.net.cell(net)?, self.shm.cell(channel)?);
                self.lent[channel] = Some((near, far));
                Some(near)
            }
            Out { net: Some(net), .. } => self.net.cell(net),
            Out { .. } => None,
        }
    }

    fn publish(&mut self, channel: usize, bytes: usize) {
        let Out { shm, net } = self.routes.outs[channel];
        if let Some((near, far)) = self.lent[channel].take() {
            // SAFETY: both cells are this channel's, lent by `cell`, with room for the message; they lie in different
            // regions. The owner of this link has written `bytes` to the first.
            unsafe { std::ptr::copy_nonoverlapping(near, far, bytes) };
        }
        if shm {
            self.shm.publish(channel, bytes);
        }
        if let Some(net) = net {
            self.net.publish(net, bytes);
        }
    }

    fn message(&mut self, inlet: usize) -> Result<Option<*const u8>, Mismatch> {
        match self.routes.ins[inlet] {
            In::Shm(inlet) => self.shm.message(inlet).map_err(|found| self.globally(found)),
            In::Net(inlet) => self.net.message(inlet),
        }
    }

    fn release(&mut self, inlet: usize) {
        match self.routes.ins[inlet] {
            In::Shm(inlet) => self.shm.release(inlet),
            In::Net(inlet) => self.net.release(inlet),
        }
    }

    fn settle(&mut self) -> Result<bool, Mismatch> {
        let here = self.shm.settle().map_err(|found| self.globally(found))?;
        Ok(here && self.net.settle()?)
    }

    fn end(&mut self) {
        self.shm.end();
        self.net.end();
    }

    fn far(&self) -> bool {
        self.shm.far()
    }

    fn flush(&mut self) {
        self.shm.flush();
    }

    fn arrived(&self, rank: usize, seq: u64) -> Option<bool> {
        match self.map.local(rank) {
            Some(local) => self.shm.arrived(local, seq),
            None => self.net.arrived(rank, seq),
        }
    }

    fn survey(&mut self) {
        let far = self.far_ranks();
        let (shm, map) = (&self.shm, &self.map);
        let mates = || (0..map.size()).filter_map(|rank| map.local(rank));
        self.net.survey(&far, |seq| mates().any(|mate| shm.arrived(mate, seq) == Some(false)));
    }

    fn awaits(&self, rank: usize, seq: u64) -> bool {
        match self.map.local(rank) {
            Some(local) => self.shm.awaits(local, seq),
            None => self.net.awaits(rank, seq),
        }
    }

    fn silent(&self) -> Vec<usize> {
        self.net.silent()
    }

    fn head_of(&self, rank: usize, seq: u64) -> Option<Head> {
        match self.map.local(rank) {
            Some(local) => self.shm.head_of(local, seq),
            None => self.net.head_of(rank, seq),
        }
    }

    fn mail_open(&mut self, to: usize, mail: Mail) -> Option<Stream> {
        match self.map.local(to) {
            Some(local) => self.shm.mail_open(local, mail),
            None => self.net.mail_open(to, mail).map(|stream| stream | NET),
        }
    }

    fn mail_cell(&mut self, stream: Stream) -> Option<(*mut u8, usize)> {
        match stream & NET {
            0 => self.shm.mail_cell(stream),
            _ => self.net.mail_cell(stream & !NET),
        }
    }

    fn mail_publish(&mut self, stream: Stream, bytes: usize) {
        match stream & NET {
            0 => self.shm.mail_publish(stream, bytes),
            _ => self.net.mail_publish(stream & !NET, bytes),
        }
    }

    fn mail_close(&mut self, stream: Stream) {
        match stream & NET {
            0 => self.shm.mail_close(stream),
            _ => self.net.mail_close(stream & !NET),
        }
    }

    fn mailed_last(&self, rank: usize) -> bool {
        self.map.local(rank).is_none() && self.net.mailed_last(rank)
    }

    fn mail_next(&mut self, from: usize) -> Option<(Mail, Stream)> {
        match self.map.local(from) {
            Some(local) => self.shm.mail_next(local),
            None => self.net.mail_next(from),
        }
    }

    fn mail_piece(&mut self, from: usize, stream: Stream) -> Option<(*const u8, usize)> {
        match self.map.local(from) {
            Some(local) => self.shm.mail_piece(local, stream),
            None => self.net.mail_piece(from, stream),
        }
    }

    fn mail_release(&mut self, from: usize, stream: Stream) {
        match self.map.local(from) {
            Some(local) => self.shm.mail_release(local, stream),
            None => self.net.mail_release(from, stream),
        }
    }

    fn faults(&mut self) -> Vec<Fault> {
        let near = self.shm.faults().into_iter().map(|fault| match fault {
            Fault::Lost { rank, how } => Fault::Lost { rank: self.map.rank(rank), how },
            Fault::Unable { rank, why } => Fault::Unable { rank: self.map.rank(rank), why },
            Fault::Left { rank } => Fault::Left { rank: self.map.rank(rank) },
            Fault::Poisoned { rank, why } => Fault::Poisoned { rank: self.map.rank(rank), why },
            Fault::Differs { seq, mine, found } => Fault::Differs { seq, mine, found: self.globally(found) },
        });
        let mut faults: Vec<Fault> = near.collect();
        faults.extend(self.net.faults());
        faults
    }

    fn poison(&mut self, why: &str) {
        self.shm.poison(why);
        let far = self.far_ranks();
        self.net.poison(why, &far);
    }

    fn leave(&mut self) {
        self.net.leave();
        self.shm.leave();
    }

    fn describe(&self, rank: usize) -> String {
        self.names.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"))
    }

    fn interest(&self, fds: &mut Vec<(RawFd, i16)>) -> bool {
        self.net.interest(fds)
    }

    fn way(&self) -> String {
        self.net.name()
    }

    fn round_trip(&self, rank: usize) -> Option<Duration> {
        self.net.round_trip(rank)
    }

    fn expect(&mut self, bytes: usize) {
        self.net.expect(bytes);
    }

    fn board(&self) -> Option<Arc<dyn Board>> {
        let local = (0..self.map.size()).map(|rank| self.map.local(rank)).collect();
        Some(Arc::new(NodeBoard { local, board: self.shm.board()? }))
    }

    fn sleeper(&self) -> Box<dyn Sleeper> {
        self.shm.sleeper()
    }
}

impl Drop for JointLink {
    fn drop(&mut self) {
        // A forked child's copy: connections are the parent's.
        if self.shm.ours() {
            self.net.leave();
        }
    }
}
