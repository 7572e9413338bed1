//! The bell of a process: where its threads sleep while nothing moves, and what other processes wake them by.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::thread::futex;

use super::layout::{DOORBELL_FLAG, DOORBELL_POLLERS, DOORBELL_SLEEPERS};
use super::memory::{SharedMemory, system_call_error};
use super::order;
use crate::lock;

/// A process's bell: whoever publishes something rings it if anybody sleeps there. Sleepers that also wait for
/// descriptors (sockets) are woken through an eventfd, the others by a futex.
#[derive(Clone)]
pub(crate) struct Doorbell {
    memory: Arc<SharedMemory>,
    event: Arc<OwnedFd>,
    /// What else those threads poll that poll the eventfd. The first to wake empties it, and one that has looked, but does not
    /// poll yet, would miss the ring: so that one passes it on to each of these.
    pollers: Arc<Mutex<Pollers>>,
}

#[derive(Default)]
struct Pollers {
    polling: Vec<Arc<OwnedFd>>,
    spare: Vec<Arc<OwnedFd>>,
}

impl Doorbell {
    /// The bell in that memory, this process's.
    pub(crate) fn new(memory: Arc<SharedMemory>) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = event.map_err(|reason| system_call_error("eventfd2", reason))?;
        Ok(Self { memory, event: Arc::new(event), pollers: Arc::default() })
    }

    fn flags(&self) -> order::Doorbell<'_> {
        flags(&self.memory)
    }

    /// I am about to sleep; see [`crate::Sleeper::prepare_wait`].
    pub(crate) fn prepare_wait(&self) -> u32 {
        self.flags().prepare_wait()
    }

    pub(crate) fn cancel_wait(&self) {
        self.flags().cancel_wait();
    }

    pub(crate) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    pub(crate) fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Sleeps until the bell rings after that ticket was taken, one of `fds` is ready for its events, or the time is up.
    pub(crate) fn sleep(&self, ticket: u32, fds: &[(RawFd, i16)], at_most: Duration) {
        self.sleep_after(ticket, fds, at_most, || {});
    }

    /// The same. `before`: what happens, where descriptors are polled, between the last look at the ticket and that.
    fn sleep_after(&self, ticket: u32, fds: &[(RawFd, i16)], at_most: Duration, before: impl FnOnce()) {
        match fds {
            // Any outcome (woken, changed, timed out, interrupted) sends the caller back to look again.
            [] => {
                let time = Timespec::try_from(at_most).ok();
                let _ = futex::wait(self.flags().flag, futex::Flags::empty(), ticket, time.as_ref());
            }
            _ => {
                // Before the look at the ticket: whoever empties the eventfd after a later ring knows of this thread.
                let mine = self.enter();
                self.flags().poll(ticket, || {
                    before();
                    self.poll(fds, at_most, mine.as_deref());
                });
                mine.into_iter().for_each(|mine| self.leave(mine));
            }
        }
    }

    /// This thread's own descriptor while it polls. Where there is none to be had, a ring may be heard at the end of the time.
    fn enter(&self) -> Option<Arc<OwnedFd>> {
        let mut pollers = lock(&self.pollers);
        let spare = pollers.spare.pop();
        let mine = match spare {
            Some(spare) => spare,
            None => Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?),
        };
        pollers.polling.push(mine.clone());
        Some(mine)
    }

    fn leave(&self, mine: Arc<OwnedFd>) {
        let mut pollers = lock(&self.pollers);
        pollers.polling.retain(|polling| !Arc::ptr_eq(polling, &mine));
        pollers.spare.push(mine);
    }

    fn poll(&self, fds: &[(RawFd, i16)], at_most: Duration, mine: Option<&OwnedFd>) {
        let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
        let mut list = Vec::with_capacity(fds.len() + 2);
        list.push(entry(self.event.as_raw_fd(), libc::POLLIN));
        // A negative one is passed over.
        list.push(entry(mine.map_or(-1, AsRawFd::as_raw_fd), libc::POLLIN));
        list.extend(fds.iter().map(|&(fd, events)| entry(fd, events)));
        let time = libc::timespec {
            tv_sec: at_most.as_secs().cast_signed(),
            tv_nsec: i64::from(at_most.subsec_nanos()),
        };
        // SAFETY: the list is ours and as long as we say. A descriptor that another thread closed meanwhile ends the
        // sleep at worst; every outcome sends the caller back to look again.
        unsafe {
            libc::ppoll(list.as_mut_ptr(), list.len() as libc::nfds_t, &raw const time, std::ptr::null())
        };
        if list[0].revents != 0 {
            let _ = rustix::io::read(&*self.event, &mut [0u8; 8]);
            self.pass_on(mine);
        }
        if let Some(mine) = mine.filter(|_| list[1].revents != 0) {
            let _ = rustix::io::read(mine, &mut [0u8; 8]);
        }
    }

    /// Wakes the other pollers.
    fn pass_on(&self, mine: Option<&OwnedFd>) {
        let mine = mine.map(AsRawFd::as_raw_fd);
        for other in lock(&self.pollers).polling.iter().filter(|other| Some(other.as_raw_fd()) != mine) {
            let _ = rustix::io::write(other, &1u64.to_ne_bytes());
        }
    }

    /// Rings whether or not somebody sleeps.
    pub(crate) fn notify(&self) {
        notify_all(&self.memory, self.event());
    }
}

fn flags(memory: &SharedMemory) -> order::Doorbell<'_> {
    let [flag, sleepers, pollers] =
        [DOORBELL_FLAG, DOORBELL_SLEEPERS, DOORBELL_POLLERS].map(|at| memory.flag32(at));
    order::Doorbell { flag, sleepers, pollers }
}

fn notify_all(memory: &SharedMemory, event: BorrowedFd<'_>) {
    let wake = |word: &AtomicU32| {
        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
    };
    flags(memory).notify(wake, || {
        let _ = rustix::io::write(event, &1u64.to_ne_bytes());
    });
}

/// Rings the bell of the process that owns `memory` if anybody may sleep there; after [`order::Doorbell::published`].
#[inline]
pub(crate) fn notify_at(memory: &SharedMemory, event: BorrowedFd<'_>) {
    if flags(memory).has_waiters() {
        notify_all(memory, event);
    }
}

/// The bell of this process; a group of one rank has none.
#[derive(Clone)]
pub struct Sleeper(pub(crate) Option<Doorbell>);

impl Sleeper {
    /// True if [`Self::sleep`] sleeps; in a group of one rank it returns at once.
    pub fn can_sleep(&self) -> bool {
        self.0.is_some()
    }

    /// Wakes all who sleep.
    pub fn notify(&self) {
        self.0.iter().for_each(Doorbell::notify);
    }

    /// The same; costs little where nobody does. Whoever does not sleep yet sees what this thread did before.
    pub fn notify_if_waiting(&self) {
        if let Some(doorbell) = &self.0 {
            order::Doorbell::publish_fence();
            notify_at(doorbell.memory(), doorbell.event());
        }
    }

    /// I am about to sleep: what is published from here on rings. One more look at the wires comes now, which sees what was
    /// published before; then [`Sleeper::sleep`] with this ticket, unless there was something; then [`Sleeper::cancel_wait`].
    pub fn prepare_wait(&self) -> u32 {
        self.0.as_ref().map_or(0, Doorbell::prepare_wait)
    }

    /// Sleeps until it rings after `ticket` was taken, one of `fds` is ready, or the time is up.
    pub fn sleep(&self, ticket: u32, fds: &[(RawFd, i16)], at_most: Duration) {
        self.0.iter().for_each(|doorbell| doorbell.sleep(ticket, fds, at_most));
    }

    pub fn cancel_wait(&self) {
        self.0.iter().for_each(Doorbell::cancel_wait);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;
    use std::time::Instant;

    use super::*;

    #[test]
    fn what_is_published_between_the_last_look_and_the_sleep_wakes() {
        let doorbell = Doorbell::new(Arc::new(SharedMemory::create(1 << 20).unwrap().0)).unwrap();
        for fds in [&[][..], &[(doorbell.event().as_raw_fd(), 0)]] {
            let ticket = doorbell.prepare_wait();
            // Here is the last look, which sees nothing. Then somebody publishes.
            order::Doorbell::publish_fence();
            notify_at(doorbell.memory(), doorbell.event());
            let begun = Instant::now();
            doorbell.sleep(ticket, fds, Duration::from_secs(20));
            doorbell.cancel_wait();
            assert!(begun.elapsed() < Duration::from_secs(10), "it sleeps its time out");
        }
    }

    #[test]
    fn a_ring_reaches_who_is_about_to_poll_though_another_poller_has_taken_it() {
        let doorbell = Doorbell::new(Arc::new(SharedMemory::create(1 << 20).unwrap().0)).unwrap();
        let fds = &[(doorbell.event().as_raw_fd(), 0)][..];
        let [mine, other] = [doorbell.prepare_wait(), doorbell.prepare_wait()];
        let begun = Instant::now();
        doorbell.sleep_after(mine, fds, Duration::from_secs(20), || {
            // It has not rung when this thread looks. Then it does, and the other thread is quicker.
            std::thread::scope(|scope| {
                let polling = scope.spawn(|| doorbell.sleep(other, fds, Duration::from_secs(20)));
                while doorbell.flags().pollers.load(Ordering::Relaxed) < 2 {
                    std::thread::yield_now();
                }
                notify_at(doorbell.memory(), doorbell.event());
                polling.join().unwrap();
            });
        });
        assert!(begun.elapsed() < Duration::from_secs(10), "it sleeps its time out");
    }

    #[test]
    fn what_one_poller_passes_on_is_passed_on_by_nobody() {
        let doorbell = Doorbell::new(Arc::new(SharedMemory::create(1 << 20).unwrap().0)).unwrap();
        let fds = &[(doorbell.event().as_raw_fd(), 0)][..];
        doorbell.prepare_wait();
        notify_at(doorbell.memory(), doorbell.event());
        // Old rings are slept through once they were heard, by any number of threads.
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let sleeps = || {
                        let begun = Instant::now();
                        doorbell.sleep(doorbell.prepare_wait(), fds, Duration::from_millis(50));
                        begun.elapsed()
                    };
                    let slept = (0..20).filter(|_| sleeps() >= Duration::from_millis(50)).count();
                    assert!(slept > 10, "{slept} of 20 sleeps were left alone");
                });
            }
        });
    }
}
