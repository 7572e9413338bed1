//! Allocations, and the addresses at which each process has them.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::clock::Clock;
use super::memory::{self, Identity, Pages};
use super::report::Operation;
use super::shadow::Shadow;
use super::words::Word;
use crate::{Address, Kind};

/// Memory, by its generation.
#[derive(Debug)]
pub(super) struct Allocation {
    /// Whose it is, and of which device; none for host memory that was registered.
    pub(super) owner: Option<(usize, i32)>,
    pub(super) kind: Kind,
    pub(super) bytes: usize,
    /// Where its bytes are.
    pub(super) backing: usize,
    /// What it is where it was registered.
    pub(super) identity: Option<Identity>,
    pub(super) live: bool,
    pub(super) shadow: Shadow,
    /// Words in it, by offset.
    pub(super) words: HashMap<usize, Word>,
}

impl Allocation {
    /// The word at `offset`, with what was written to it past the checker.
    pub(super) fn word(&mut self, offset: usize) -> &mut Word {
        // SAFETY: a word inside a live allocation, aligned: checked where its address was resolved.
        let value = unsafe { memory::load(self.backing + offset) };
        let word = self.words.entry(offset).or_insert_with(|| Word::new(value));
        word.holds(value);
        word
    }
}

/// How a process came by memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Had {
    Own,
    Registered,
    /// Mapped so many times (a legacy handle opened again gives the same address).
    Imported {
        times: usize,
        mapped: bool,
    },
}

/// Memory as one process has it.
#[derive(Debug)]
pub(super) struct View {
    pub(super) process: usize,
    pub(super) base: Address,
    pub(super) bytes: usize,
    pub(super) allocation: u64,
    /// Of `base` in the allocation.
    pub(super) offset: usize,
    pub(super) had: Had,
    pub(super) open: bool,
    /// The last use by each actor, through this view.
    pub(super) uses: HashMap<usize, (u64, Arc<Operation>)>,
}

/// Bytes of one allocation, reached through one view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) view: u64,
    pub(super) allocation: u64,
    pub(super) offset: usize,
    pub(super) bytes: usize,
}

#[derive(Debug, Default)]
pub(super) struct Space {
    pub(super) allocations: HashMap<u64, Allocation>,
    pub(super) views: HashMap<u64, View>,
    /// Open views of each process by their address.
    at: HashMap<usize, BTreeMap<Address, u64>>,
    last: u64,
    /// Unmapped when the world is over.
    pages: Vec<Pages>,
    /// Freed device memory that may be given out again, where the script says so.
    spare: Vec<usize>,
}

impl Space {
    /// A number that was not used before.
    pub(super) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// The address of new pages (`usable` or faulting). `None` where there are no more.
    pub(super) fn reserve(&mut self, bytes: usize, usable: bool) -> Option<Address> {
        if usable {
            let pages = &self.pages;
            let whole = bytes.max(1).next_multiple_of(memory::PAGE);
            if let Some(k) = self.spare.iter().position(|spare| pages[*spare].usable() == whole) {
                return Some(self.pages[self.spare.swap_remove(k)].base());
            }
        }
        let pages = Pages::new(bytes, usable)?;
        let base = pages.base();
        self.pages.push(pages);
        Some(base)
    }

    /// The pages at `base` are no longer used: given out again, or never.
    pub(super) fn retire(&mut self, base: Address, again: bool) {
        if let Some(k) = self.pages.iter().position(|pages| pages.base() == base) {
            if again {
                self.spare.push(k);
            } else {
                self.pages[k].retire();
            }
        }
    }

    pub(super) fn add_view(
        &mut self,
        process: usize,
        base: Address,
        bytes: usize,
        of: (u64, usize),
        had: Had,
    ) -> u64 {
        let number = self.number();
        let (allocation, offset) = of;
        let uses = HashMap::new();
        let view = View { process, base, bytes, allocation, offset, had, open: true, uses };
        self.views.insert(number, view);
        self.at.entry(process).or_default().insert(base, number);
        number
    }

    /// The open view of `process` in which `address` lies.
    pub(super) fn find(&self, process: usize, address: Address) -> Option<(u64, &View)> {
        let (_, number) = self.at.get(&process)?.range(..=address).next_back()?;
        let view = self.views.get(number)?;
        (address - view.base < view.bytes.max(1) as u64).then_some((*number, view))
    }

    /// The view that `process` had last where `address` lies, no longer open.
    pub(super) fn find_closed(&self, process: usize, address: Address) -> Option<&View> {
        let lies = |view: &View| (view.base..view.base + view.bytes as u64).contains(&address);
        let of = |view: &&View| view.process == process && !view.open && lies(view);
        self.views
            .iter()
            .filter(|(_, view)| of(view))
            .max_by_key(|(number, _)| **number)
            .map(|(_, view)| view)
    }

    /// Where the bytes are that `process` has at `address`: several pieces where allocations are mapped in a row.
    pub(super) fn resolve(&self, process: usize, address: Address, bytes: usize) -> Option<Vec<Piece>> {
        let mut pieces = Vec::with_capacity(1);
        let mut done = 0;
        while done < bytes {
            let (number, view) = self.find(process, address + done as u64)?;
            let into = (address + done as u64 - view.base) as usize;
            let here = (view.bytes - into).min(bytes - done);
            let offset = view.offset + into;
            pieces.push(Piece { view: number, allocation: view.allocation, offset, bytes: here });
            done += here;
        }
        Some(pieces)
    }

    /// Takes the view away from its process. Gives the uses that `clock` does not know to be over.
    pub(super) fn close_view(&mut self, number: u64, clock: &Clock) -> Vec<Operation> {
        let Some(view) = self.views.get_mut(&number) else { return Vec::new() };
        view.open = false;
        if let Some(at) = self.at.get_mut(&view.process)
            && at.get(&view.base) == Some(&number)
        {
            at.remove(&view.base);
        }
        unfinished(view, clock)
    }

    /// Uses of the allocation, by whomever, that `clock` does not know to be over.
    pub(super) fn unfinished(&self, allocation: u64, clock: &Clock) -> Vec<Operation> {
        let views = self.views.values().filter(|view| view.allocation == allocation);
        views.flat_map(|view| unfinished(view, clock)).collect()
    }

    /// Whether the piece may be touched now.
    pub(super) fn alive(&self, piece: &Piece) -> bool {
        self.views.get(&piece.view).is_some_and(|view| view.open)
            && self.allocations.get(&piece.allocation).is_some_and(|allocation| allocation.live)
    }
}

fn unfinished(view: &View, clock: &Clock) -> Vec<Operation> {
    let late = view.uses.iter().filter(|(actor, (tick, _))| clock.of(**actor) < *tick);
    late.map(|(_, (_, operation))| operation.as_ref().clone()).collect()
}

/// Reads the first bytes of `pieces` after `skip`.
///
/// # Safety
/// The pieces are alive.
pub(super) unsafe fn gather(space: &Space, pieces: &[Piece], skip: usize, to: &mut [u8]) {
    for (backing, range) in parts(space, pieces, skip, to.len()) {
        // SAFETY: inside a live allocation; see `parts`.
        unsafe { memory::read(backing, &mut to[range]) };
    }
}

/// Writes into `pieces` after `skip`.
///
/// # Safety
/// The pieces are alive.
pub(super) unsafe fn scatter(space: &Space, pieces: &[Piece], skip: usize, from: &[u8]) {
    for (backing, range) in parts(space, pieces, skip, from.len()) {
        // SAFETY: inside a live allocation; see `parts`.
        unsafe { memory::write(backing, &from[range]) };
    }
}

/// Where `bytes` bytes of `pieces` after `skip` lie, and which of those bytes.
fn parts(space: &Space, pieces: &[Piece], skip: usize, bytes: usize) -> Vec<(usize, std::ops::Range<usize>)> {
    let mut parts = Vec::with_capacity(pieces.len());
    let mut start = 0;
    for piece in pieces {
        let (first, end) = (start.max(skip), (start + piece.bytes).min(skip + bytes));
        if first < end
            && let Some(allocation) = space.allocations.get(&piece.allocation)
        {
            let backing = allocation.backing + piece.offset + (first - start);
            parts.push((backing, first - skip..end - skip));
        }
        start += piece.bytes;
    }
    parts
}
