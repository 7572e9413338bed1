//! Doorbell of a process: its threads wait on it while no data arrives, and other processes notify it.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::thread::futex;
use smddp_base::lock;

use super::layout::{DOORBELL_FLAG, DOORBELL_POLLERS, DOORBELL_SLEEPERS};
use super::memory::{SharedMemory, system_call_error};
use super::order;

/// Wait object of a process. A publisher notifies it if a thread is waiting. Waiters that also poll descriptors
/// (sockets) are woken through an eventfd, the others through a futex.
#[derive(Clone)]
pub struct Doorbell {
    memory: Arc<SharedMemory>,
    event: Arc<OwnedFd>,
    /// Descriptors of the threads that poll the eventfd. The first thread to wake drains the eventfd. A thread that
    /// has checked its ticket, but does not poll yet, would miss the notification. The first thread therefore
    /// forwards it to each of these descriptors.
    pollers: Arc<Mutex<Pollers>>,
}

#[derive(Default)]
struct Pollers {
    polling: Vec<Arc<OwnedFd>>,
    spare: Vec<Arc<OwnedFd>>,
}

impl Doorbell {
    /// Creates the doorbell in `memory`, which belongs to this process.
    pub(crate) fn new(memory: Arc<SharedMemory>) -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let event = event.map_err(|reason| system_call_error("eventfd2", reason))?;
        Ok(Self { memory, event: Arc::new(event), pollers: Arc::default() })
    }

    fn flags(&self) -> order::Doorbell<'_> {
        flags(&self.memory)
    }

    /// Announces a wait; see [`crate::Sleeper::prepare_wait`].
    pub(crate) fn prepare_wait(&self) -> u32 {
        self.flags().prepare_wait()
    }

    pub(crate) fn cancel_wait(&self) {
        self.flags().cancel_wait();
    }

    /// Returns the eventfd that wakes threads which wait for descriptors too.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Returns the shared memory of this process.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Sleeps until a notification after the ticket, until one of `fds` is ready for its events, or for at most
    /// `at_most`.
    pub(crate) fn sleep(&self, ticket: u32, fds: &[(RawFd, i16)], at_most: Duration) {
        self.sleep_after(ticket, fds, at_most, || {});
    }

    /// Implements `sleep`. `before`: test hook between the ticket check and the poll of the descriptors.
    fn sleep_after(&self, ticket: u32, fds: &[(RawFd, i16)], at_most: Duration, before: impl FnOnce()) {
        match fds {
            // After any outcome (woken, changed, timed out, interrupted) the caller polls again.
            [] => {
                let time = Timespec::try_from(at_most).ok();
                let _ = futex::wait(self.flags().flag, futex::Flags::empty(), ticket, time.as_ref());
            }
            _ => {
                // Registers before the ticket check: a thread that drains the eventfd after a later notification
                // finds this thread in the list.
                let mine = self.enter();
                self.flags().poll(ticket, || {
                    before();
                    self.poll(fds, at_most, mine.as_deref());
                });
                mine.into_iter().for_each(|mine| self.leave(mine));
            }
        }
    }

    /// Registers a descriptor of this thread while it polls. Without one (descriptor limit), the thread may observe a
    /// notification only after its timeout.
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
        // `ppoll` ignores negative descriptors.
        list.push(entry(mine.map_or(-1, AsRawFd::as_raw_fd), libc::POLLIN));
        list.extend(fds.iter().map(|&(fd, events)| entry(fd, events)));
        let time = libc::timespec {
            tv_sec: at_most.as_secs().cast_signed(),
            tv_nsec: i64::from(at_most.subsec_nanos()),
        };
        // SAFETY: this function owns the list of the given length. If another thread closes a descriptor meanwhile,
        // the sleep ends early at worst; after every outcome the caller polls again.
        unsafe {
            libc::ppoll(list.as_mut_ptr(), list.len() as libc::nfds_t, &raw const time, std::ptr::null())
        };
        if list[0].revents != 0 {
            let _ = rustix::io::read(&*self.event, &mut [0u8; 8]);
            self.forward_notification(mine);
        }
        if let Some(mine) = mine.filter(|_| list[1].revents != 0) {
            let _ = rustix::io::read(mine, &mut [0u8; 8]);
        }
    }

    /// Wakes the other polling threads.
    fn forward_notification(&self, mine: Option<&OwnedFd>) {
        let mine = mine.map(AsRawFd::as_raw_fd);
        for other in lock(&self.pollers).polling.iter().filter(|other| Some(other.as_raw_fd()) != mine) {
            let _ = rustix::io::write(other, &1u64.to_ne_bytes());
        }
    }

    /// Notifies unconditionally.
    pub fn notify(&self) {
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

/// Notifies the process that owns `memory` if a thread may be waiting; called after
/// [`order::Doorbell::publish_fence`].
#[inline]
pub fn notify_at(memory: &SharedMemory, event: BorrowedFd<'_>) {
    if flags(memory).has_waiters() {
        notify_all(memory, event);
    }
}

/// Doorbell of this process; `None` in a group of one rank.
#[derive(Clone)]
pub struct Sleeper(pub Option<Doorbell>);

impl Sleeper {
    /// Returns true if [`Self::sleep`] sleeps. In a group of one rank it returns immediately.
    pub fn can_sleep(&self) -> bool {
        self.0.is_some()
    }

    /// Wakes all waiting threads.
    pub fn notify(&self) {
        self.0.iter().for_each(Doorbell::notify);
    }

    /// Wakes all waiting threads; cheap without any. A thread that is not waiting yet observes this thread's earlier
    /// writes in its final poll.
    pub fn notify_if_waiting(&self) {
        if let Some(doorbell) = &self.0 {
            order::Doorbell::publish_fence();
            notify_at(doorbell.memory(), doorbell.event());
        }
    }

    /// Announces a wait: later publications notify this thread. The caller then polls once more, which observes
    /// earlier publications. If that finds nothing, it calls [`Sleeper::sleep`] with this ticket. In both cases it
    /// ends with [`Sleeper::cancel_wait`].
    pub fn prepare_wait(&self) -> u32 {
        self.0.as_ref().map_or(0, Doorbell::prepare_wait)
    }

    /// Sleeps until a notification after `ticket`, until one of `fds` is ready, or for at most `at_most`.
    pub fn sleep(&self, ticket: u32, fds: &[(RawFd, i16)], at_most: Duration) {
        self.0.iter().for_each(|doorbell| doorbell.sleep(ticket, fds, at_most));
    }

    /// Ends a wait that [`Self::prepare_wait`] announced.
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
    fn publication_between_the_final_poll_and_the_sleep_wakes() {
        let doorbell = Doorbell::new(Arc::new(SharedMemory::create(1 << 20).unwrap().0)).unwrap();
        for fds in [&[][..], &[(doorbell.event().as_raw_fd(), 0)]] {
            let ticket = doorbell.prepare_wait();
            // The final poll would find nothing here. Then a peer publishes.
            order::Doorbell::publish_fence();
            notify_at(doorbell.memory(), doorbell.event());
            let begun = Instant::now();
            doorbell.sleep(ticket, fds, Duration::from_secs(20));
            doorbell.cancel_wait();
            assert!(begun.elapsed() < Duration::from_secs(10), "the notification was lost");
        }
    }

    #[test]
    fn notification_reaches_a_thread_before_its_poll_although_another_poller_drained_it() {
        let doorbell = Doorbell::new(Arc::new(SharedMemory::create(1 << 20).unwrap().0)).unwrap();
        let fds = &[(doorbell.event().as_raw_fd(), 0)][..];
        let [ticket, other] = [doorbell.prepare_wait(), doorbell.prepare_wait()];
        let begun = Instant::now();
        doorbell.sleep_after(ticket, fds, Duration::from_secs(20), || {
            // The ticket check of this thread finds no notification. Then one arrives, and the other thread drains
            // it.
            std::thread::scope(|scope| {
                let polling = scope.spawn(|| doorbell.sleep(other, fds, Duration::from_secs(20)));
                while doorbell.flags().pollers.load(Ordering::Relaxed) < 2 {
                    std::thread::yield_now();
                }
                notify_at(doorbell.memory(), doorbell.event());
                polling.join().unwrap();
            });
        });
        assert!(begun.elapsed() < Duration::from_secs(10), "the notification was lost");
    }

    #[test]
    fn forwarded_notification_is_not_forwarded_again() {
        let doorbell = Doorbell::new(Arc::new(SharedMemory::create(1 << 20).unwrap().0)).unwrap();
        let fds = &[(doorbell.event().as_raw_fd(), 0)][..];
        doorbell.prepare_wait();
        notify_at(doorbell.memory(), doorbell.event());
        // Consumed notifications do not wake later sleeps, for any number of threads.
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let sleeps = || {
                        let begun = Instant::now();
                        doorbell.sleep(doorbell.prepare_wait(), fds, Duration::from_millis(50));
                        begun.elapsed()
                    };
                    let slept = (0..20).filter(|_| sleeps() >= Duration::from_millis(50)).count();
                    assert!(slept > 10, "{slept} of 20 sleeps lasted their full time");
                });
            }
        });
    }
}
