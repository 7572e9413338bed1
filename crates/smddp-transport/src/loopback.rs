//! Ranks as threads of one process, over plain memory, with a script of delays and deaths.
//!
//! It shares no code with the real wires: whatever runs here and there has been tried over two implementations.
//! A message stays hidden for a seeded number of looks, so messages of different channels overtake each other;
//! inside a channel they stay in order, as the plan demands.

use std::cell::UnsafeCell;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::board::{self, Board, Lending, Lent, Maker};
use crate::{Fault, Head, Link, Mail, Mismatch, Sleeper, Stream, Wiring};

/// What goes wrong, and when.
#[derive(Clone, Copy, Debug, Default)]
pub struct Script {
    pub seed: u64,
    /// A message is hidden for up to this many looks.
    pub delay: u64,
    /// This rank dies at its n-th publish.
    pub death: Option<(usize, u64)>,
}

struct Message {
    bytes: Arc<[u64]>,
    hidden: u64,
}

#[derive(Default)]
struct Flow {
    bytes: u64,
    depth: usize,
    messages: VecDeque<Message>,
    /// Number of the first message still kept.
    first: usize,
    /// Messages read, by reader.
    read: Vec<usize>,
}

#[derive(Default)]
struct Letters {
    announced: Vec<(Mail, Stream)>,
    pieces: HashMap<Stream, VecDeque<Arc<[u64]>>>,
}

#[derive(Default)]
struct State {
    heads: HashMap<(usize, u64), Head>,
    begun: Vec<u64>,
    done: Vec<u64>,
    flows: HashMap<(usize, u64, usize), Flow>,
    letters: HashMap<(usize, usize), Letters>,
    dead: Vec<bool>,
    left: Vec<bool>,
    poison: Vec<Option<String>>,
    published: Vec<u64>,
    rings: u32,
    next: Stream,
}

/// A rank's words, reached as atomics only.
#[repr(C, align(4096))]
struct Page(UnsafeCell<[u8; board::PAGE]>);

// SAFETY: nobody makes references into it: all ranks reach it as atomics, by address.
unsafe impl Sync for Page {}

struct Hub {
    pages: Vec<Page>,
    /// What each rank lends.
    lending: Vec<Lending>,
    state: Mutex<State>,
    changed: Condvar,
    script: Script,
}

impl Hub {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn sleep(&self, ticket: u32, at_most: Duration) {
        let state = self.lock();
        drop(self.changed.wait_timeout_while(state, at_most, |state| state.rings == ticket));
    }
    fn ring(&self, state: &mut State) {
        state.rings = state.rings.wrapping_add(1);
        self.changed.notify_all();
    }
}

/// Scrambles a number (splitmix64).
fn scramble(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// How far a rank may run ahead, as with shared memory.
const SLOTS: u64 = 4;
const PIECE: usize = 4096;

/// The links of a group of `size` ranks; give one to each thread.
pub fn group(size: usize, script: Script) -> Vec<LoopLink> {
    let state = State {
        begun: vec![0; size],
        done: vec![0; size],
        dead: vec![false; size],
        left: vec![false; size],
        poison: vec![None; size],
        published: vec![0; size],
        ..State::default()
    };
    let hub = Arc::new(Hub {
        pages: (0..size).map(|_| Page(UnsafeCell::new([0; board::PAGE]))).collect(),
        lending: (0..size).map(|_| Lending::default()).collect(),
        state: Mutex::new(state),
        changed: Condvar::new(),
        script,
    });
    (0..size)
        .map(|rank| LoopLink {
            hub: hub.clone(),
            rank,
            size,
            seq: 0,
            head: Head::default(),
            wiring: Wiring::default(),
            open: Vec::new(),
            held: Vec::new(),
            taken: Vec::new(),
            drafts: HashMap::new(),
            letter: None,
            unheld: Vec::new(),
            differs: None,
        })
        .collect()
}

pub struct LoopLink {
    hub: Arc<Hub>,
    rank: usize,
    size: usize,
    seq: u64,
    head: Head,
    wiring: Wiring,
    /// The cell being filled, by outlet.
    open: Vec<Option<Arc<[u64]>>>,
    /// The message being read, by inlet.
    held: Vec<Option<Arc<[u64]>>>,
    taken: Vec<usize>,
    drafts: HashMap<Stream, (usize, Arc<[u64]>)>,
    letter: Option<Arc<[u64]>>,
    /// Operations over here that read nobody's header: (number, header, rank).
    unheld: Vec<(u64, Head, usize)>,
    differs: Option<Fault>,
}

fn words(bytes: usize) -> Arc<[u64]> {
    vec![0; bytes.div_ceil(8).max(1)].into()
}

impl LoopLink {
    fn dead(&self, state: &State) -> bool {
        state.dead[self.rank]
    }
}

impl Link for LoopLink {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        self.size
    }
    fn slot_bytes(&self) -> usize {
        8192
    }

    fn begin(&mut self, seq: u64, head: Head, wiring: &Wiring) -> bool {
        let mut state = self.hub.lock();
        let far =
            |r: usize| seq >= SLOTS && r != self.rank && state.done[r] < seq + 1 - SLOTS && !state.left[r];
        if self.dead(&state) || (0..self.size).any(far) {
            return false;
        }
        let differs = &mut self.differs;
        self.unheld.retain(|&(before, mine, rank)| {
            let theirs = state.heads.get(&(rank, before));
            if let Some(&theirs) = theirs.filter(|&&theirs| theirs != mine) {
                let found = Mismatch { rank, theirs, bytes: None };
                differs.get_or_insert(Fault::Differs { seq: before, mine, found });
            }
            theirs.is_none() && state.begun[rank] <= before && !state.left[rank]
        });
        let gone = |r: usize| state.poison[r].is_some() || state.dead[r] && state.begun[r] <= seq;
        let needs_nothing = wiring.inlets.iter().all(|inlet| inlet.messages == 0);
        if self.differs.is_some() || needs_nothing && (0..self.size).any(|r| r != self.rank && gone(r)) {
            return false;
        }
        state.heads.insert((self.rank, seq), head);
        state.begun[self.rank] = seq + 1;
        let old = seq.saturating_sub(2 * SLOTS);
        state.heads.retain(|&(rank, s), _| rank != self.rank || s >= old);
        state.flows.retain(|&(writer, s, _), _| writer != self.rank || s >= old);
        for (channel, outlet) in wiring.outlets.iter().enumerate() {
            let flow = Flow {
                bytes: outlet.bytes,
                depth: wiring.depth.1.max(1),
                read: vec![0; outlet.readers.len()],
                ..Flow::default()
            };
            state.flows.insert((self.rank, seq, channel), flow);
        }
        self.hub.ring(&mut state);
        drop(state);
        self.seq = seq;
        self.head = head;
        self.open = vec![None; wiring.outlets.len()];
        self.held = vec![None; wiring.inlets.len()];
        self.taken = vec![0; wiring.inlets.len()];
        self.wiring = wiring.clone();
        true
    }

    fn cell(&mut self, channel: usize) -> Option<*mut u8> {
        let state = self.hub.lock();
        let flow = state.flows.get(&(self.rank, self.seq, channel))?;
        let sent = flow.first + flow.messages.len();
        if self.dead(&state) || sent - flow.read.iter().copied().min().unwrap_or(sent) >= flow.depth {
            return None;
        }
        let cell = self.open[channel].get_or_insert_with(|| words(self.wiring.outlets[channel].cell));
        // Nobody else has this Arc until it is published.
        Arc::get_mut(cell).map(|words| words.as_mut_ptr().cast())
    }

    fn publish(&mut self, channel: usize, _bytes: usize) {
        let Some(bytes) = self.open[channel].take() else { return };
        let script = self.hub.script;
        let mut state = self.hub.lock();
        state.published[self.rank] += 1;
        if script.death == Some((self.rank, state.published[self.rank])) {
            state.dead[self.rank] = true;
        } else if let Some(flow) = state.flows.get_mut(&(self.rank, self.seq, channel)) {
            let number = (flow.first + flow.messages.len()) as u64;
            let id = [self.rank as u64, self.seq, channel as u64, number]
                .iter()
                .fold(script.seed, |h, &x| scramble(h ^ x));
            flow.messages.push_back(Message { bytes, hidden: id % (script.delay + 1) });
        }
        self.hub.ring(&mut state);
    }

    fn message(&mut self, inlet: usize) -> Result<Option<*const u8>, Mismatch> {
        let want = self.wiring.inlets[inlet];
        let mut state = self.hub.lock();
        if self.dead(&state) {
            return Ok(None);
        }
        let Some(&theirs) = state.heads.get(&(want.rank, self.seq)) else { return Ok(None) };
        if theirs != self.head {
            return Err(Mismatch { rank: want.rank, theirs, bytes: None });
        }
        let Some(flow) = state.flows.get_mut(&(want.rank, self.seq, want.channel)) else {
            // It has begun and has no such channel: nothing comes.
            let differs = !self.wiring.inline && want.bytes != 0;
            let found = Mismatch { rank: want.rank, theirs, bytes: Some((want.bytes, 0)) };
            return if differs { Err(found) } else { Ok(None) };
        };
        if !self.wiring.inline && flow.bytes != want.bytes {
            return Err(Mismatch { rank: want.rank, theirs, bytes: Some((want.bytes, flow.bytes)) });
        }
        let Some(message) = flow.messages.get_mut(self.taken[inlet] - flow.first) else { return Ok(None) };
        if message.hidden > 0 {
            message.hidden -= 1;
            // Hidden, not absent: whoever would sleep now must look again.
            self.hub.ring(&mut state);
            return Ok(None);
        }
        let held = self.held[inlet].insert(message.bytes.clone());
        Ok(Some(held.as_ptr().cast()))
    }

    fn release(&mut self, inlet: usize) {
        let want = self.wiring.inlets[inlet];
        self.held[inlet] = None;
        self.taken[inlet] += 1;
        let mut state = self.hub.lock();
        if let Some(flow) = state.flows.get_mut(&(want.rank, self.seq, want.channel)) {
            flow.read[want.reader] = self.taken[inlet];
            while flow.read.iter().all(|&read| read > flow.first) && !flow.messages.is_empty() {
                flow.messages.pop_front();
                flow.first += 1;
            }
        }
        self.hub.ring(&mut state);
    }

    fn settle(&mut self) -> Result<bool, Mismatch> {
        let state = self.hub.lock();
        for want in self.wiring.inlets.iter().filter(|inlet| inlet.messages == 0) {
            let Some(&theirs) = state.heads.get(&(want.rank, self.seq)) else { return Ok(false) };
            if theirs != self.head {
                return Err(Mismatch { rank: want.rank, theirs, bytes: None });
            }
            let offered = state.flows.get(&(want.rank, self.seq, want.channel)).map_or(0, |flow| flow.bytes);
            if !self.wiring.inline && offered != want.bytes {
                return Err(Mismatch { rank: want.rank, theirs, bytes: Some((want.bytes, offered)) });
            }
        }
        Ok(true)
    }

    fn end(&mut self) {
        if self.wiring.inlets.is_empty() {
            let others = (0..self.size).filter(|&rank| rank != self.rank);
            let (seq, head) = (self.seq, self.head);
            self.unheld.extend(others.map(|rank| (seq, head, rank)));
        }
        let mut state = self.hub.lock();
        state.done[self.rank] = self.seq + 1;
        self.hub.ring(&mut state);
    }

    fn arrived(&self, rank: usize, seq: u64) -> Option<bool> {
        Some(self.hub.lock().begun[rank] > seq)
    }

    fn far(&self) -> bool {
        // Both ways of writing are tried.
        !self.seq.is_multiple_of(2)
    }

    fn flush(&mut self) {}

    fn head_of(&self, rank: usize, seq: u64) -> Option<Head> {
        self.hub.lock().heads.get(&(rank, seq)).copied()
    }

    fn mail_open(&mut self, to: usize, mail: Mail) -> Option<Stream> {
        let mut state = self.hub.lock();
        state.next += 1;
        let stream = state.next;
        let letters = state.letters.entry((self.rank, to)).or_default();
        letters.announced.push((mail, stream));
        letters.pieces.insert(stream, VecDeque::new());
        self.drafts.insert(stream, (to, words(PIECE)));
        self.hub.ring(&mut state);
        Some(stream)
    }

    fn mail_cell(&mut self, stream: Stream) -> Option<(*mut u8, usize)> {
        let (_, draft) = self.drafts.get_mut(&stream)?;
        Arc::get_mut(draft).map(|words| (words.as_mut_ptr().cast(), PIECE))
    }

    fn mail_publish(&mut self, stream: Stream, _bytes: usize) {
        let Some((to, draft)) = self.drafts.get_mut(&stream) else { return };
        let piece = std::mem::replace(draft, words(PIECE));
        let mut state = self.hub.lock();
        if let Some(letters) = state.letters.get_mut(&(self.rank, *to)) {
            letters.pieces.entry(stream).or_default().push_back(piece);
        }
        self.hub.ring(&mut state);
    }

    fn mail_close(&mut self, stream: Stream) {
        self.drafts.remove(&stream);
    }

    fn mail_next(&mut self, from: usize) -> Option<(Mail, Stream)> {
        let mut state = self.hub.lock();
        let letters = state.letters.get_mut(&(from, self.rank))?;
        (!letters.announced.is_empty()).then(|| letters.announced.remove(0))
    }

    fn mail_piece(&mut self, from: usize, stream: Stream) -> Option<(*const u8, usize)> {
        let state = self.hub.lock();
        let piece = state.letters.get(&(from, self.rank))?.pieces.get(&stream)?.front()?;
        let held = self.letter.insert(piece.clone());
        Some((held.as_ptr().cast(), PIECE))
    }

    fn mail_release(&mut self, from: usize, stream: Stream) {
        let mut state = self.hub.lock();
        if let Some(pieces) =
            state.letters.get_mut(&(from, self.rank)).and_then(|l| l.pieces.get_mut(&stream))
        {
            pieces.pop_front();
        }
        self.hub.ring(&mut state);
    }

    fn faults(&mut self) -> Vec<Fault> {
        let state = self.hub.lock();
        let others =
            (0..self.size).filter(|&rank| rank != self.rank).filter_map(|rank| match &state.poison[rank] {
                Some(why) => Some(Fault::Poisoned { rank, why: why.clone() }),
                None if state.dead[rank] => Some(Fault::Lost { rank, how: "died".to_owned() }),
                None => state.left[rank].then_some(Fault::Left { rank }),
            });
        self.differs.clone().into_iter().chain(others).collect()
    }

    fn poison(&mut self, why: &str) {
        let mut state = self.hub.lock();
        state.poison[self.rank].get_or_insert_with(|| why.to_owned());
        self.hub.ring(&mut state);
    }

    fn leave(&mut self) {
        let mut state = self.hub.lock();
        state.left[self.rank] = true;
        self.hub.ring(&mut state);
    }

    fn describe(&self, rank: usize) -> String {
        format!("rank {rank} (a thread)")
    }

    fn board(&self) -> Option<Arc<dyn Board>> {
        Some(Arc::new(LoopBoard { hub: self.hub.clone(), rank: self.rank }))
    }

    fn sleeper(&self) -> Box<dyn Sleeper> {
        Box::new(LoopBell(self.hub.clone()))
    }
}

struct LoopBoard {
    hub: Arc<Hub>,
    rank: usize,
}

impl Board for LoopBoard {
    fn page(&self, rank: usize) -> Option<*mut u8> {
        self.hub.pages.get(rank).map(|page| page.0.get().cast())
    }

    fn keep(&self) {}

    fn lend(&self, maker: Maker) -> u64 {
        self.hub.lending[self.rank].lend(maker)
    }

    fn withdraw(&self, token: u64) {
        self.hub.lending[self.rank].withdraw(token);
    }

    fn borrow(&self, rank: usize, token: u64) -> io::Result<Lent> {
        self.hub.lending[rank].make(token)
    }
}

struct LoopBell(Arc<Hub>);

impl Sleeper for LoopBell {
    fn ring(&self) {
        let mut state = self.0.lock();
        self.0.ring(&mut state);
    }

    /// It rings always.
    fn drowse(&self) -> u32 {
        self.0.lock().rings
    }

    fn rise(&self) {}

    fn sleep(&self, ticket: u32, _fds: &[(RawFd, i16)], at_most: Duration) {
        self.0.sleep(ticket, at_most);
    }
}
