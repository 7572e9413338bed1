//! Functions for tests besides the driver API. Texts are records that end in [`END`].

use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::check::{self, World};
use crate::history::reached;
use crate::shadow::Touch;
use crate::state::*;
use crate::types::CUcontext;
use crate::{memory, modules, streams};

const END: char = '\x1e';

/// Begins a checked world with these settings ("NAME=VALUE", separated by spaces), which take precedence over the
/// environment. Drops everything that was open before.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_begin(text: *const c_char) {
    set(&CStr::from_ptr(text).to_string_lossy());
    check::begin();
    reset();
    memory::reset();
    streams::reset();
    modules::reset();
}

/// Makes this thread the process `rank` of the world for calls without a current context.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_process(rank: usize) {
    become_process(check::first() + rank);
}

/// Runs all streams until each is empty or blocked in a wait, for at most the world's patience. Then calls `then`.
fn wait_until_idle(then: impl Fn(&mut World)) {
    let begun = Instant::now();
    let settles = |world: &mut World, _| {
        let quiet = world.settle() || begun.elapsed() > settings().patience;
        if quiet {
            then(world);
        }
        quiet
    };
    while check::with(check::first(), settles) == Some(false) {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Runs all streams until each is empty or blocked in a wait. Then orders all completed work before all later host
/// accesses.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_settle() {
    wait_until_idle(|_| {});
}

/// Settles the world, reports and releases the streams that are blocked in a wait, and ends the checks.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_end() {
    wait_until_idle(World::end);
}

/// Writes the list "reports", "waits", "stalls" or "leaks" to `to`, at most `room` bytes. Returns the full size in
/// bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_query(what: *const c_char, to: *mut u8, room: usize) -> usize {
    let mut leaks = streams::list_open();
    let records = check::with(check::first(), |world, _| match CStr::from_ptr(what).to_bytes() {
        b"reports" => world.reports.clone(),
        b"stalls" => world.stalls.clone(),
        b"waits" => {
            let line = |((rank, stream, index), seen): (&check::WaitId, &check::RecordedWait)| {
                let check::RecordedWait { description, word, early, redundant } = seen;
                format!("{rank}.{stream}.{index} {word} {early} {} {description}", *redundant == Some(false))
            };
            world.waits.iter().map(line).collect()
        }
        _ => {
            let line = |(&(rank, base), view): (&(usize, u64), &crate::views::View)| {
                format!("rank {rank}: {} bytes ({:?}) at {base:#x}", view.bytes, view.origin)
            };
            leaks.extend(world.views.iter().map(line));
            std::mem::take(&mut leaks)
        }
    });
    let text: String =
        records.unwrap_or_default().into_iter().flat_map(|record| [record, END.to_string()]).collect();
    std::ptr::copy_nonoverlapping(text.as_ptr(), to, text.len().min(room));
    text.len()
}

/// Performs a host access to memory that streams use too, and returns the value read.
///
/// Kinds of accesses: load a word (0), test if a word has reached the value `operand` (1), store `operand` to a word (2).
/// Kinds that are only reported: read (3) or write (4) of `operand` bytes.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_host(
    context: CUcontext,
    what: c_int,
    address: u64,
    operand: u64,
) -> u64 {
    check::delay_at_random();
    let (bytes, touch) = match what {
        0 | 1 => (8, Touch::AtomicRead),
        2 => (8, Touch::AtomicWrite),
        3 => (operand as usize, Touch::Read),
        _ => (operand as usize, Touch::Write),
    };
    let checked = check::with(process_of(context), |world, rank| {
        world.locate(rank, address)?;
        let by = world.host_operation(rank, &format!("{touch:?} of {bytes} bytes at {address:#x}"));
        let host = world.host(rank);
        let (actor, clock) = (host.actor, host.clock.clone());
        world.touch(rank, (address, bytes), touch, (actor, &clock, &by));
        if what == 2 {
            let clock = world.take_host_clock(rank);
            world.write_word(rank, address, operand, clock);
        }
        if what > 1 {
            return Some(0);
        }
        let word = world.word(rank, address)?;
        let (found, learned) = match what {
            0 => (None, word.read()),
            _ => {
                let satisfied = word.clock_for(operand);
                (Some(satisfied.is_some()), satisfied.flatten())
            }
        };
        learned.iter().for_each(|learned| world.host(rank).clock.join_seen(learned));
        found.map_or_else(|| world.load(rank, address), |found| Some(found.into()))
    });
    if let Some(given) = checked.flatten() {
        return given;
    }
    if what > 2 {
        return 0;
    }
    let word = AtomicU64::from_ptr(address as *mut u64);
    match what {
        0 => word.load(Ordering::Acquire),
        1 => reached(word.load(Ordering::Acquire), operand).into(),
        _ => {
            word.store(operand, Ordering::Release);
            0
        }
    }
}
