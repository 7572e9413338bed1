//! Memory as a checked world sees it: what it really is, and at which addresses each process has it.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::check::{By, World, here};
use crate::clock::Clock;
use crate::history::Word;
use crate::shadow::{Access, Shadow, Touch};

/// Device and inode: shared mappings of one file are the same memory wherever they are mapped. Private memory is a file of
/// its own, by its address.
pub(crate) type File = (u64, u64);

pub(crate) struct Allocation {
    /// Whose it is; nobody's where processes made it known.
    owner: Option<usize>,
    /// Its owner has not given it back.
    live: bool,
    shadow: Shadow,
    /// Words in it, by offset.
    words: HashMap<usize, Word>,
    /// Through views that are closed.
    uses: Uses,
}

/// The last use by each actor.
type Uses = HashMap<usize, (u64, Arc<str>)>;

/// Uses that `clock` does not know to be over.
fn unfinished(uses: &Uses, clock: &Clock) -> impl Iterator<Item = Arc<str>> {
    let late = uses.iter().filter(|(actor, (tick, _))| clock.of(**actor) < *tick);
    late.map(|(_, (_, by))| by.clone())
}

/// How a process came by memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Had {
    Device,
    Host,
    Registered,
    Imported,
}

/// Memory as one process has it.
pub(crate) struct View {
    pub(crate) bytes: usize,
    pub(crate) had: Had,
    file: File,
    /// Of its first byte.
    offset: usize,
    uses: Uses,
}

/// Bytes of one view.
#[derive(Clone, Copy)]
struct Piece {
    view: (usize, u64),
    file: File,
    offset: usize,
    bytes: usize,
}

/// What ordinary memory of this process really is, and the offset in it.
fn identity(address: u64) -> (File, usize) {
    // A line is "start-end rwxs offset major:minor inode path", in hexadecimal but for the inode.
    let in_line = |line: &str| {
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let (start, end) = (hex(start)?, hex(end)?);
        if !(start..end).contains(&address) || !fields.next()?.ends_with('s') {
            return None;
        }
        let offset = hex(fields.next()?)?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let file = (hex(major)? << 32 | hex(minor)?, fields.next()?.parse().ok()?);
        Some((file, (offset + (address - start)) as usize))
    };
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().find_map(in_line).unwrap_or(((0, address), 0))
}

/// The process that calls has memory at `base` from now on: of a file of the driver's, if it is one.
pub(crate) fn opened(base: u64, bytes: usize, had: Had, file: Option<RawFd>) {
    here(|world, rank| {
        let file = file.and_then(|file| std::fs::metadata(format!("/proc/self/fd/{file}")).ok());
        let (file, offset) = match (file, had) {
            (Some(file), _) => ((file.dev(), file.ino()), 0),
            (None, Had::Registered) => identity(base),
            (None, _) => ((0, base), 0),
        };
        let owner = (!matches!(had, Had::Registered)).then_some(rank);
        let shadow = || Shadow::new(had != Had::Device);
        let allocation =
            || Allocation { owner, live: true, shadow: shadow(), words: HashMap::new(), uses: Uses::new() };
        world.allocations.entry(file).or_insert_with(allocation);
        world.views.insert((rank, base), View { bytes, had, file, offset, uses: Uses::new() });
    });
}

/// It has none there any more, by `call`.
pub(crate) fn closed(base: u64, call: &str) {
    here(|world, rank| {
        let Some(view) = world.views.remove(&(rank, base)) else { return };
        let clock = world.host(rank).clock.clone();
        let mut late: Vec<_> = unfinished(&view.uses, &clock).collect();
        let others = world.views.values().filter(|other| other.file == view.file);
        let frees = matches!(view.had, Had::Device | Had::Host);
        if frees {
            let closed = world.allocations.get(&view.file).map(|allocation| &allocation.uses);
            let uses = others.clone().map(|other| &other.uses).chain(closed);
            late.extend(uses.flat_map(|uses| unfinished(uses, &clock)));
        }
        let last = others.count() == 0;
        let fault = if view.had == Had::Imported { "Closed" } else { "Freed" };
        let operation = world.host_operation(rank, &format!("{call} of {base:#x}"));
        for used in late {
            world.report(fault, "nothing orders this use before that", &[&used, &operation]);
        }
        if last {
            world.allocations.remove(&view.file);
        } else if let Some(allocation) = world.allocations.get_mut(&view.file) {
            allocation.live &= !frees;
            for (actor, used) in view.uses {
                let last = allocation.uses.entry(actor).or_insert_with(|| used.clone());
                *last = if last.0 < used.0 { used } else { last.clone() };
            }
        }
    });
}

/// Whether an address that this process does not have is another one's of the world: no ordinary memory then.
pub(crate) fn elsewhere(address: u64) -> bool {
    let lies = |(base, view): (u64, &View)| (base..base + view.bytes as u64).contains(&address);
    here(|world, _| world.views.iter().any(|(&(_, base), view)| lies((base, view)))).unwrap_or(false)
}

impl World {
    /// The view of the process in which an address lies, and how far in.
    fn find(&self, rank: usize, address: u64) -> Option<((usize, u64), &View, usize)> {
        let (key, view) = self.views.range((rank, 0)..=(rank, address)).next_back()?;
        let into = (address - key.1) as usize;
        (into < view.bytes).then_some((*key, view, into))
    }

    /// Where the bytes are: several pieces where memory is mapped in a row.
    fn pieces(&self, rank: usize, (address, bytes): (u64, usize)) -> Option<Vec<Piece>> {
        let (mut pieces, mut done) = (Vec::with_capacity(1), 0);
        while done < bytes {
            let (key, view, into) = self.find(rank, address + done as u64)?;
            let here = (view.bytes - into).min(bytes - done);
            pieces.push(Piece { view: key, file: view.file, offset: view.offset + into, bytes: here });
            done += here;
        }
        Some(pieces)
    }

    pub(crate) fn locate(&self, rank: usize, address: u64) -> Option<(File, usize)> {
        self.find(rank, address).map(|(_, view, into)| (view.file, view.offset + into))
    }

    /// What a word holds; `None` where the process has no memory.
    pub(crate) fn load(&self, rank: usize, address: u64) -> Option<u64> {
        self.find(rank, address)?;
        // Mapped: a view goes before its mapping does, by this lock.
        Some(unsafe { AtomicU64::from_ptr(address as *mut u64) }.load(Ordering::Acquire))
    }

    /// A word's history, with what was written to it past the checker.
    pub(crate) fn word(&mut self, rank: usize, address: u64) -> Option<&mut Word> {
        let (value, (file, offset)) = (self.load(rank, address)?, self.locate(rank, address)?);
        let words = &mut self.allocations.get_mut(&file)?.words;
        let word = words.entry(offset).or_insert_with(|| Word::new(value));
        word.holds(value);
        Some(word)
    }

    /// A word is written by an actor that knows `knows`. False where the process has no memory.
    pub(crate) fn write_word(&mut self, rank: usize, address: u64, value: u64, knows: Clock) -> bool {
        // Whatever was written past the checker came before.
        let Some(word) = self.word(rank, address) else { return false };
        word.write(value, Arc::new(knows));
        // As in `load`.
        unsafe { AtomicU64::from_ptr(address as *mut u64) }.store(value, Ordering::SeqCst);
        true
    }

    /// "64 bytes at offset 128 of rank 0's allocation 7".
    fn named(&self, file: File, offset: usize, bytes: usize) -> String {
        let owner = self.allocations.get(&file).and_then(|allocation| allocation.owner);
        let owner = owner.map_or("the registered".into(), |rank| format!("rank {rank}'s"));
        format!("{bytes} bytes at offset {offset} of {owner} allocation {:x}", file.1)
    }

    /// Bytes are touched. False where they must not be: the memory is gone.
    pub(crate) fn touch(
        &mut self,
        rank: usize,
        span: (u64, usize),
        touch: Touch,
        (actor, clock, by): By<'_>,
    ) -> bool {
        let tick = clock.of(actor);
        let access = Access { actor, tick, touch, poisoned: clock.poisoned, by: by.clone() };
        let Some(pieces) = self.pieces(rank, span) else { return false };
        let mut alive = true;
        for Piece { view, file, offset, bytes } in pieces {
            if let Some(view) = self.views.get_mut(&view) {
                view.uses.insert(actor, (tick, by.clone()));
            }
            let Some(allocation) = self.allocations.get_mut(&file) else { continue };
            if !allocation.live {
                alive = false;
                let text =
                    format!("nothing orders this before the freeing of {}", self.named(file, offset, bytes));
                self.report("Freed", &text, &[by]);
                continue;
            }
            let found = allocation.shadow.touch(offset..offset + bytes, &access, clock);
            for (range, earlier) in found.races {
                let what = self.named(file, range.start, range.len());
                self.report("Race", &format!("nothing orders these two on {what}"), &[&earlier.by, by]);
            }
            if let Some(range) = found.unwritten {
                let what = self.named(file, range.start, range.len());
                self.report("Unwritten", &format!("nothing wrote what this reads, {what}"), &[by]);
            }
        }
        alive
    }

    /// Reports parts of one operation that touch the same bytes, one of them writing: their order among themselves is free.
    pub(crate) fn overlaps(&mut self, rank: usize, parts: &[(u64, usize, bool)], by: &str) {
        let pieces = parts.iter().flat_map(|&(at, bytes, writes)| {
            let pieces = self.pieces(rank, (at, bytes)).unwrap_or_default();
            pieces
                .into_iter()
                .map(move |piece| (piece.file, piece.offset, piece.offset + piece.bytes, writes))
        });
        let mut pieces: Vec<_> = pieces.collect();
        pieces.sort_unstable();
        for (k, &(file, _, end, writes)) in pieces.iter().enumerate() {
            let mut common = pieces[k + 1..].iter().take_while(|next| next.0 == file && next.1 < end);
            if let Some(next) = common.find(|next| writes || next.3) {
                let text = format!(
                    "parts of this touch both {}",
                    self.named(file, next.1, end.min(next.2) - next.1)
                );
                return self.report("Overlap", &text, &[by]);
            }
        }
    }
}
