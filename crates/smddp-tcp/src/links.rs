//! Kernel statistics of a group's open connections, for `smddp status`. Any thread may read them: the table has no part
//! in sending or receiving, and it does not keep a connection open.

use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use smddp_base::{CloseOnFork, lock};

/// Bytes of the kernel's `tcp_info` up to the last value that is used here.
const INFO_BYTES: usize = 192;
/// Offsets of values in the kernel's `tcp_info`, in bytes. `libc::tcp_info` ends before the newer ones.
const APP_LIMITED: usize = 7;
const ROUND_TRIP: usize = 68;
const TOTAL_RETRANSMITS: usize = 100;
const BYTES_ACKED: usize = 120;
const BYTES_RECEIVED: usize = 128;
const MIN_ROUND_TRIP: usize = 148;
const DELIVERY_RATE: usize = 160;
const BUSY_TIME: usize = 168;
const RECEIVER_LIMITED_TIME: usize = 176;

/// Kernel statistics of one connection, in the direction from this rank to `peer`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LinkStats {
    /// Rank at the other end.
    pub peer: usize,
    /// Smoothed round-trip time, which includes queues on the path.
    pub round_trip: Duration,
    /// Shortest round-trip time of the last minutes; `None` if nothing was acknowledged.
    pub min_round_trip: Option<Duration>,
    /// Newest delivery rate in bytes per second; `None` if this rank sent too little to fill the path.
    pub delivery_rate: Option<u64>,
    /// Acknowledged bytes per second of the time in which data was in flight, since an earlier reading or the start;
    /// `None` if no data was in flight.
    pub mean_rate: Option<u64>,
    /// Share of that time in which the peer's receive window was full.
    pub receiver_limited: f64,
    /// Bytes that the peer's kernel has acknowledged, and the opening segment.
    pub sent: u64,
    /// Bytes received from the peer.
    pub received: u64,
    /// Retransmitted segments.
    pub retransmits: u32,
}

/// Minimum age of the reading since which the mean rate is taken, and minimum bytes sent since then. Readings without
/// traffic in between keep the earlier rate.
const MIN_AGE: Duration = Duration::from_secs(5);
const MIN_SENT: u64 = 16 << 20;

/// Totals of a connection: acknowledged bytes, and microseconds with data in flight and with a full receive window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Totals {
    sent: u64,
    busy: u64,
    receiver_limited: u64,
}

/// Interval of the mean rate.
#[derive(Default)]
struct Interval {
    /// Totals at its start.
    start: Totals,
    /// Later reading, at which the next interval starts.
    next: Option<(Instant, Totals)>,
}

impl Interval {
    /// Returns the totals since the start of the interval. Starts the next one if it has enough time and traffic.
    fn since_start(&mut self, now: Instant, totals: Totals) -> Totals {
        let (at, next) = *self.next.get_or_insert((now, totals));
        if now.duration_since(at) >= MIN_AGE && totals.sent.saturating_sub(next.sent) >= MIN_SENT {
            (self.start, self.next) = (next, Some((now, totals)));
        }
        Totals {
            sent: totals.sent.saturating_sub(self.start.sent),
            busy: totals.busy.saturating_sub(self.start.busy),
            receiver_limited: totals.receiver_limited.saturating_sub(self.start.receiver_limited),
        }
    }
}

/// Open connection of a wire.
struct OpenLink {
    peer: usize,
    socket: Weak<CloseOnFork<TcpStream>>,
    interval: Interval,
}

/// Open connections of one group.
#[derive(Default)]
pub(super) struct OpenLinks(Mutex<Vec<OpenLink>>);

impl OpenLinks {
    /// Adds an established connection with `peer`. Removes connections that were closed.
    pub(super) fn add(&self, peer: usize, socket: &Arc<CloseOnFork<TcpStream>>) {
        let mut open = lock(&self.0);
        open.retain(|link| link.socket.strong_count() > 0);
        open.push(OpenLink { peer, socket: Arc::downgrade(socket), interval: Interval::default() });
    }

    /// Returns the statistics of all open connections.
    pub(super) fn stats(&self) -> Vec<LinkStats> {
        let (mut open, now) = (lock(&self.0), Instant::now());
        let mut found = Vec::with_capacity(open.len());
        // If the wire drops a connection during this call, its socket is closed after the lock is released.
        let mut sockets = Vec::with_capacity(open.len());
        for link in open.iter_mut() {
            let Some(socket) = link.socket.upgrade() else { continue };
            found.extend(stats(link.peer, &socket, &mut link.interval, now));
            sockets.push(socket);
        }
        drop(open);
        found
    }
}

fn stats(peer: usize, socket: &TcpStream, interval: &mut Interval, now: Instant) -> Option<LinkStats> {
    let info = KernelInfo::of(socket.as_raw_fd())?;
    let micros = |at| info.u32_at(at).map(|value| Duration::from_micros(value.into()));
    let total = |at| info.u64_at(at).unwrap_or(0);
    let totals = Totals {
        sent: total(BYTES_ACKED),
        busy: total(BUSY_TIME),
        receiver_limited: total(RECEIVER_LIMITED_TIME),
    };
    let recent = interval.since_start(now, totals);
    let per_busy = |value: u64| (recent.busy > 0).then(|| value as f64 / recent.busy as f64);
    let is_path_full = info.0[APP_LIMITED] & 1 == 0;
    Some(LinkStats {
        peer,
        round_trip: micros(ROUND_TRIP)?,
        min_round_trip: info.min_round_trip(),
        delivery_rate: info.u64_at(DELIVERY_RATE).filter(|&rate| is_path_full && rate > 0),
        mean_rate: per_busy(recent.sent).map(|rate| (1e6 * rate) as u64),
        receiver_limited: per_busy(recent.receiver_limited).unwrap_or(0.0),
        sent: totals.sent,
        received: total(BYTES_RECEIVED),
        retransmits: info.u32_at(TOTAL_RETRANSMITS).unwrap_or(0),
    })
}

/// Beginning of the kernel's `tcp_info` of a connection.
pub(super) struct KernelInfo([u8; INFO_BYTES], usize);

impl KernelInfo {
    /// Reads the state of an open socket; `None` if the descriptor is not a TCP socket.
    pub(super) fn of(socket: RawFd) -> Option<Self> {
        let mut info = [0u8; INFO_BYTES];
        let mut bytes = info.len() as libc::socklen_t;
        // SAFETY: TCP_INFO writes at most `bytes` bytes, the size of the array.
        let result = unsafe {
            libc::getsockopt(
                socket,
                libc::IPPROTO_TCP,
                libc::TCP_INFO,
                info.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        (result == 0).then_some(Self(info, bytes as usize))
    }

    /// Returns the shortest round-trip time; `None` if nothing was acknowledged yet.
    pub(super) fn min_round_trip(&self) -> Option<Duration> {
        let micros = self.u32_at(MIN_ROUND_TRIP).filter(|&micros| micros != u32::MAX)?;
        Some(Duration::from_micros(micros.into()))
    }

    /// Returns the bytes at `at`; `None` if this kernel is too old to provide them.
    fn bytes_at<const N: usize>(&self, at: usize) -> Option<[u8; N]> {
        self.0[..self.1.min(INFO_BYTES)].get(at..at + N)?.try_into().ok()
    }

    fn u32_at(&self, at: usize) -> Option<u32> {
        self.bytes_at(at).map(u32::from_ne_bytes)
    }

    fn u64_at(&self, at: usize) -> Option<u64> {
        self.bytes_at(at).map(u64::from_ne_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn statistics_count_the_bytes_of_an_open_connection_only() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect =
            || Arc::new(CloseOnFork::new(TcpStream::connect(listener.local_addr().unwrap()).unwrap()));
        let (ours, closed, links) = (connect(), connect(), OpenLinks::default());
        let (mut theirs, _) = listener.accept().unwrap();
        links.add(7, &closed);
        links.add(3, &ours);
        drop(closed);
        (&**ours).write_all(&[0; 1000]).unwrap();
        theirs.read_exact(&mut [0; 1000]).unwrap();
        theirs.write_all(&[0; 10]).unwrap();
        (&**ours).read_exact(&mut [0; 10]).unwrap();
        let found = links.stats();
        assert_eq!(found.iter().map(|link| link.peer).collect::<Vec<_>>(), [3]);
        // The kernel counts the opening segment as a byte.
        assert_eq!((found[0].sent, found[0].received, found[0].retransmits), (1001, 10, 0));
        let minimum = found[0].min_round_trip.unwrap();
        assert!(minimum <= found[0].round_trip && minimum < Duration::from_secs(10), "{found:?}");
        // A rate of a few bytes says nothing about the path.
        assert_eq!(found[0].delivery_rate, None);
        drop(ours);
        assert_eq!(links.stats(), []);
        assert_eq!(theirs.read(&mut [0]).unwrap(), 0, "the table keeps a connection open");
    }

    #[test]
    fn mean_rate_follows_a_link_that_becomes_slow_and_keeps_its_value_without_traffic() {
        let (begin, mut interval) = (Instant::now(), Interval::default());
        let mut read = |seconds, mebibytes: u64, busy| {
            let totals = Totals { sent: mebibytes << 20, busy, receiver_limited: busy / 2 };
            let recent = interval.since_start(begin + Duration::from_secs(seconds), totals);
            assert_eq!(recent.receiver_limited, recent.busy / 2);
            (recent.sent >> 20, recent.busy)
        };
        assert_eq!(read(0, 1000, 10), (1000, 10));
        // Too early, and too few bytes.
        assert_eq!(read(4, 1100, 20), (1100, 20));
        assert_eq!(read(9, 1015, 30), (1015, 30));
        // From the first reading on.
        assert_eq!(read(10, 1100, 110), (100, 100));
        assert_eq!(read(1000, 1100, 110), (100, 100));
        assert_eq!(read(1010, 1116, 210), (16, 100));
    }

    #[test]
    fn values_that_an_older_kernel_does_not_provide_are_absent() {
        let info = KernelInfo([1; INFO_BYTES], MIN_ROUND_TRIP + 3);
        assert!(info.min_round_trip().is_none() && info.u64_at(BUSY_TIME).is_none());
        assert_eq!(info.u32_at(TOTAL_RETRANSMITS), Some(0x0101_0101));
    }
}
