//! Memory in a checked world: the allocations, and the addresses at which each process maps them.

use std::collections::HashMap;
use std::os::fd::RawFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::check::{Accessor, World, with_caller};
use crate::clock::Clock;
use crate::history::Word;
use crate::shadow::{Access, Shadow, Touch};

/// Device and inode: shared mappings of one file are the same memory at every address. Private memory counts as a
/// separate file, identified by its address.
pub(crate) type File = (u64, u64);

pub(crate) struct Allocation {
    /// Owning process; `None` for registered memory.
    owner: Option<usize>,
    /// The owner has not freed it.
    live: bool,
    shadow: Shadow,
    /// Words by offset.
    words: HashMap<usize, Word>,
    /// Uses through views that are closed.
    uses: Uses,
}

/// The last use by each actor.
type Uses = HashMap<usize, (u64, Arc<str>)>;

/// Returns the uses that are not ordered before `clock`.
fn unfinished(uses: &Uses, clock: &Clock) -> impl Iterator<Item = Arc<str>> {
    let late = uses.iter().filter(|(actor, (tick, _))| clock.of(**actor) < *tick);
    late.map(|(_, (_, by))| by.clone())
}

/// Origin of a process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    Device,
    Host,
    Registered,
    Imported,
}

/// A mapping of an allocation in one process.
pub(crate) struct View {
    pub(crate) bytes: usize,
    pub(crate) origin: Origin,
    file: File,
    /// Offset of the first byte in the allocation.
    offset: usize,
    uses: Uses,
}

/// Part of one view.
#[derive(Clone, Copy)]
struct Piece {
    view: (usize, u64),
    file: File,
    offset: usize,
    bytes: usize,
}

/// Returns the file behind pageable memory of this process, and the offset in it.
fn identity(address: u64) -> (File, usize) {
    // A line is "start-end rwxs offset major:minor inode path", hexadecimal except for the inode.
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

/// Adds a view of the calling process at `base`. `file` is the driver's file of the memory, if any.
pub(crate) fn opened(base: u64, bytes: usize, origin: Origin, file: Option<RawFd>) {
    with_caller(|world, rank| {
        let file = file.and_then(|file| std::fs::metadata(format!("/proc/self/fd/{file}")).ok());
        let (file, offset) = match (file, origin) {
            (Some(file), _) => ((file.dev(), file.ino()), 0),
            (None, Origin::Registered) => identity(base),
            (None, _) => ((0, base), 0),
        };
        let owner = (!matches!(origin, Origin::Registered)).then_some(rank);
        let shadow = || Shadow::new(origin != Origin::Device);
        let allocation =
            || Allocation { owner, live: true, shadow: shadow(), words: HashMap::new(), uses: Uses::new() };
        world.allocations.entry(file).or_insert_with(allocation);
        world.views.insert((rank, base), View { bytes, origin, file, offset, uses: Uses::new() });
    });
}

/// Removes the view at `base` on behalf of `call`.
pub(crate) fn closed(base: u64, call: &str) {
    with_caller(|world, rank| {
        let Some(view) = world.views.remove(&(rank, base)) else { return };
        let clock = world.host(rank).clock.clone();
        let mut late: Vec<_> = unfinished(&view.uses, &clock).collect();
        let others = world.views.values().filter(|other| other.file == view.file);
        let frees = matches!(view.origin, Origin::Device | Origin::Host);
        if frees {
            let closed = world.allocations.get(&view.file).map(|allocation| &allocation.uses);
            let uses = others.clone().map(|other| &other.uses).chain(closed);
            late.extend(uses.flat_map(|uses| unfinished(uses, &clock)));
        }
        let last = others.count() == 0;
        let fault = if view.origin == Origin::Imported { "Closed" } else { "Freed" };
        let operation = world.host_operation(rank, &format!("{call} of {base:#x}"));
        for used in late {
            world.report(fault, "this use is not ordered before the release", &[&used, &operation]);
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

/// Returns true if another process of the world has a view at this address, so that it is not pageable memory here.
pub(crate) fn belongs_to_other_process(address: u64) -> bool {
    let contains = |(base, view): (u64, &View)| (base..base + view.bytes as u64).contains(&address);
    with_caller(|world, _| world.views.iter().any(|(&(_, base), view)| contains((base, view)))).unwrap_or(false)
}

impl World {
    /// Returns the process's view that contains an address, and the offset in the view.
    fn find(&self, rank: usize, address: u64) -> Option<((usize, u64), &View, usize)> {
        let (key, view) = self.views.range((rank, 0)..=(rank, address)).next_back()?;
        let into = (address - key.1) as usize;
        (into < view.bytes).then_some((*key, view, into))
    }

    /// Splits a range into pieces, one per view; adjacent views may cover it.
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

    /// Returns the value of a word; `None` if the process has no memory there.
    pub(crate) fn load(&self, rank: usize, address: u64) -> Option<u64> {
        self.find(rank, address)?;
        // Mapped: a view is removed before its mapping, under this lock.
        Some(unsafe { AtomicU64::from_ptr(address as *mut u64) }.load(Ordering::Acquire))
    }

    /// Returns a word's history, including writes outside the checker.
    pub(crate) fn word(&mut self, rank: usize, address: u64) -> Option<&mut Word> {
        let (value, (file, offset)) = (self.load(rank, address)?, self.locate(rank, address)?);
        let words = &mut self.allocations.get_mut(&file)?.words;
        let word = words.entry(offset).or_insert_with(|| Word::new(value));
        word.observe(value);
        Some(word)
    }

    /// Writes a word for an actor with this clock. Returns false if the process has no memory there.
    pub(crate) fn write_word(&mut self, rank: usize, address: u64, value: u64, clock: Clock) -> bool {
        // Writes outside the checker precede this one.
        let Some(word) = self.word(rank, address) else { return false };
        word.write(value, Arc::new(clock));
        // Mapped, as in `load`.
        unsafe { AtomicU64::from_ptr(address as *mut u64) }.store(value, Ordering::SeqCst);
        true
    }

    /// Returns a description like "64 bytes at offset 128 of rank 0's allocation 7".
    fn describe(&self, file: File, offset: usize, bytes: usize) -> String {
        let owner = self.allocations.get(&file).and_then(|allocation| allocation.owner);
        let owner = owner.map_or("the registered".into(), |rank| format!("rank {rank}'s"));
        format!("{bytes} bytes at offset {offset} of {owner} allocation {:x}", file.1)
    }

    /// Records an access. Returns false if it must not happen, because the memory was freed.
    pub(crate) fn touch(
        &mut self,
        rank: usize,
        span: (u64, usize),
        touch: Touch,
        (actor, clock, by): Accessor<'_>,
    ) -> bool {
        let tick = clock.of(actor);
        let access = Access { actor, tick, touch, after_abort: clock.after_abort, by: by.clone() };
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
                    format!("not ordered before the free of {}", self.describe(file, offset, bytes));
                self.report("Freed", &text, &[by]);
                continue;
            }
            let found = allocation.shadow.touch(offset..offset + bytes, &access, clock);
            for (range, earlier) in found.races {
                let bytes = self.describe(file, range.start, range.len());
                self.report("Race", &format!("no order between these two accesses to {bytes}"), &[&earlier.by, by]);
            }
            if let Some(range) = found.unwritten {
                let bytes = self.describe(file, range.start, range.len());
                self.report("Unwritten", &format!("read before any write: {bytes}"), &[by]);
            }
        }
        alive
    }

    /// Reports parts of one operation that access the same bytes, one of them writing: their order is undefined.
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
                    "two parts of one operation access {}",
                    self.describe(file, next.1, end.min(next.2) - next.1)
                );
                return self.report("Overlap", &text, &[by]);
            }
        }
    }
}
