//! How a thread waits: spin briefly, yield, then sleep on the bell. One policy, one place.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use smddp_transport::Link;

/// Ranks of the largest group of this process: a guess at how many share the cores.
static CROWD: AtomicUsize = AtomicUsize::new(1);

pub(crate) fn note_group(size: usize) {
    CROWD.fetch_max(size, Ordering::Relaxed);
}

/// Cores of the machine. Not those this thread may run on: a rank pinned to a core still has its own.
pub(crate) fn cores() -> usize {
    std::fs::read_to_string("/sys/devices/system/cpu/online")
        .ok()
        .and_then(|text| {
            text.trim().split(',').try_fold(0, |sum, range| {
                let (a, b) = range.split_once('-').unwrap_or((range, range));
                Some(sum + b.parse::<usize>().ok()? + 1 - a.parse::<usize>().ok()?)
            })
        })
        .or_else(|| std::thread::available_parallelism().ok().map(std::num::NonZero::get))
        .unwrap_or(1)
}

/// A belt for the bell: nobody sleeps longer without a look.
const NAP: Duration = Duration::from_millis(20);
const YIELDS: u32 = 50;
/// Looks without asking the clock.
const FREE_LOOKS: u32 = 128;

pub(crate) struct Patience {
    spin: Duration,
    looks: u32,
    yields: u32,
    since: Option<Instant>,
}

impl Patience {
    /// `spin`: the setting; without one, ranks that have a core each spin.
    pub(crate) fn new(spin: Option<Duration>) -> Self {
        let spin = spin.unwrap_or_else(|| {
            static CORES: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
            let cores = *CORES.get_or_init(cores);
            if CROWD.load(Ordering::Relaxed) <= cores { Duration::from_micros(50) } else { Duration::ZERO }
        });
        Self { spin, looks: 0, yields: 0, since: None }
    }

    /// Something moved: start anew.
    pub(crate) fn reset(&mut self) {
        self.looks = 0;
        self.yields = 0;
        self.since = None;
    }

    /// One wait after a look in vain. `true`: the caller should look once more and then call [`Patience::nap`].
    pub(crate) fn wait(&mut self) -> bool {
        if !self.spin.is_zero() {
            if self.looks < FREE_LOOKS {
                self.looks += 1;
                std::hint::spin_loop();
                return false;
            }
            let since = *self.since.get_or_insert_with(Instant::now);
            if since.elapsed() < self.spin {
                for _ in 0..8 {
                    std::hint::spin_loop();
                }
                return false;
            }
        }
        if self.yields < YIELDS {
            self.yields += 1;
            std::thread::yield_now();
            return false;
        }
        true
    }

    pub(crate) fn nap(&mut self, link: &dyn Link, ticket: u32, at_most: Duration) {
        link.sleep(ticket, NAP.min(at_most));
        // Woken by somebody: the next message is often close behind.
        self.yields = YIELDS / 2;
    }
}
