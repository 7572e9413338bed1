//! What a test asks of the driver and tells it, besides what programs do. Texts are records that end in [`END`].

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

/// Begins a checked world with these settings ("NAME=VALUE", with spaces between), which come before the environment's. All
/// that was open before is forgotten.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_begin(text: *const c_char) {
    set(&CStr::from_ptr(text).to_string_lossy());
    check::begin();
    forget();
    memory::forget();
    streams::forget();
    modules::forget();
}

/// This thread is that process of the world from now on, wherever no context is current.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_process(rank: usize) {
    become_process(check::first() + rank);
}

/// Lets all streams go on until each is empty or stands at a wait, at most for the world's patience.
fn quieten(then: impl Fn(&mut World)) {
    let begun = Instant::now();
    let settles = |world: &mut World, _| {
        let quiet = world.settles() || begun.elapsed() > settings().patience;
        if quiet {
            then(world);
        }
        quiet
    };
    while check::with(check::first(), settles) == Some(false) {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Lets all streams go on until each is empty or stands at a wait, and orders all that is done before all that any host does
/// from now on.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_settle() {
    quieten(|_| {});
}

/// The same; then streams that stand at a wait are reported and let go, and nothing more is checked.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn fake_end() {
    quieten(World::end);
}

/// What the world knows of "reports", "waits", "stalls" or "leaks". Gives the bytes that there are; as many as there is room
/// for are written.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_tell(what: *const c_char, to: *mut u8, room: usize) -> usize {
    let mut leaks = streams::left();
    let records = check::with(check::first(), |world, _| match CStr::from_ptr(what).to_bytes() {
        b"reports" => world.reports.clone(),
        b"stalls" => world.stalls.clone(),
        b"waits" => {
            let line = |((rank, stream, index), seen): (&check::WaitId, &check::Seen)| {
                let check::Seen { what, word, early, redundant } = seen;
                format!("{rank}.{stream}.{index} {word} {early} {} {what}", *redundant == Some(false))
            };
            world.waits.iter().map(line).collect()
        }
        _ => {
            let line = |(&(rank, base), view): (&(usize, u64), &crate::views::View)| {
                format!("rank {rank}: {} bytes ({:?}) at {base:#x}", view.bytes, view.had)
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

/// What a host does with memory that streams use too: it reads a word (0), asks whether a word has reached a number (1), writes a
/// word (2), or is about to read (3) or write (4) `operand` bytes. Does it, and gives what was read.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_host(
    context: CUcontext,
    what: c_int,
    address: u64,
    operand: u64,
) -> u64 {
    check::shake();
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
            let knows = world.host_knows(rank);
            world.write_word(rank, address, operand, knows);
        }
        if what > 1 {
            return Some(0);
        }
        let word = world.word(rank, address)?;
        let (found, learned) = match what {
            0 => (None, word.read()),
            _ => {
                let through = word.lets_through(operand);
                (Some(through.is_some()), through.flatten())
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
