//! Bandwidth of a link, estimated from bursts of messages.
//!
//! A TCP connection starts with a small congestion window, which about doubles in each round trip. With short round
//! trips this has no visible effect. On a long link a burst ends before the link is full, so bytes over time
//! underestimate the bandwidth. There, bursts grow by a factor of 3 to 8 while they still find a higher bandwidth.
//! Only the second half of such a burst counts, when the window has grown.

use std::time::Duration;

use super::nanos;

/// Bytes of a burst's messages: the largest message that is sent without waiting for a grant.
pub(super) const LARGE: usize = 64 << 10;
/// Messages of the first burst, which is not timed: a traffic shaper lets about as much pass at any rate.
const WARMUP_MESSAGES: usize = 2;
/// Messages of the timed bursts. A burst follows only if the previous one was not conclusive. The last one fits in
/// the data that a receiver accepts without a grant.
const BURSTS: [usize; 3] = [4, 32, 96];
/// Shortest time that is measured reliably.
const MIN_TIME: Duration = Duration::from_millis(1);
/// Round trips after which the congestion window has surely grown.
const FULL_WINDOW_ROUND_TRIPS: u32 = 8;
/// Gain below which a longer burst has found the bandwidth.
const MIN_GAIN: f64 = 1.25;

/// Bandwidth measurement of one link.
pub(super) struct Bandwidth {
    round_trip: Duration,
    bursts: usize,
    done: bool,
    rate: f64,
}

impl Bandwidth {
    pub(super) fn new(round_trip: Duration) -> Self {
        Self { round_trip, bursts: 0, done: false, rate: 0.0 }
    }

    /// Returns the number of messages of the next burst.
    pub(super) fn next(&self) -> Option<usize> {
        let timed = || BURSTS.get(self.bursts - 1).copied();
        if self.bursts == 0 { Some(WARMUP_MESSAGES) } else { timed().filter(|_| !self.done) }
    }

    /// Adds a burst of `messages` messages: the reply to its first half came after `half`, the one to all after
    /// `whole`.
    pub(super) fn add(&mut self, messages: usize, half: Duration, whole: Duration) {
        self.bursts += 1;
        if messages <= WARMUP_MESSAGES {
            return;
        }
        let bytes = (messages * LARGE) as f64;
        // Excludes the latency of the last message and of the reply, but at most half of the time.
        let all = bytes / nanos(whole.saturating_sub(self.round_trip).max(whole / 2));
        if whole > MIN_TIME && whole > FULL_WINDOW_ROUND_TRIPS * self.round_trip {
            (self.rate, self.done) = (all, true);
            return;
        }
        let second = bytes / 2.0 / nanos(whole.saturating_sub(half));
        // The first reply may be late, which makes the second half seem faster.
        let found = if whole > MIN_TIME { second.clamp(all, 2.0 * all) } else { all };
        self.done = whole > MIN_TIME && self.rate > 0.0 && found < MIN_GAIN * self.rate;
        self.rate = self.rate.max(found);
    }

    /// Returns the bandwidth in bytes per nanosecond.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Model of a starting connection: `window` bytes in flight, growing by the acknowledged bytes.
    struct StartingConnection {
        round_trip: f64,
        bytes_per_ns: f64,
        window: f64,
    }

    impl StartingConnection {
        /// Returns the time until a burst of `bytes` is acknowledged. The window grows by its size.
        fn burst(&mut self, bytes: f64) -> Duration {
            let (mut left, mut at) = (bytes, 0.0);
            while left > 0.0 {
                let burst = left.min(self.window);
                let busy = burst / self.bytes_per_ns;
                left -= burst;
                // A full link sends continuously; otherwise the sender waits for the first acknowledgement.
                at += if left > 0.0 { busy.max(self.round_trip) } else { busy + self.round_trip };
                self.window += burst;
            }
            Duration::from_nanos(at as u64)
        }
    }

    /// Returns the measured share of the real bandwidth, and the time taken.
    fn measured(round_trip_ms: f64, gbit: f64, first: f64) -> (f64, Duration) {
        let mut link =
            StartingConnection { round_trip: round_trip_ms * 1e6, bytes_per_ns: gbit / 8.0, window: first };
        let mut bandwidth = Bandwidth::new(Duration::from_nanos(link.round_trip as u64));
        let mut took = Duration::ZERO;
        while let Some(messages) = bandwidth.next() {
            let bytes = (messages * LARGE) as f64;
            let half = StartingConnection { ..link }.burst(bytes / 2.0);
            let whole = link.burst(bytes);
            bandwidth.add(messages, half, whole);
            took += whole;
        }
        (bandwidth.rate() / link.bytes_per_ns, took)
    }

    #[test]
    fn slow_start_does_not_affect_the_measured_bandwidth() {
        for round_trip_ms in [0.03, 0.1, 1.0, 5.0, 10.0, 20.0, 50.0] {
            for gbit in [0.1, 0.3, 1.0] {
                for first in [14_600.0, 90_000.0] {
                    let (share, took) = measured(round_trip_ms, gbit, first);
                    let case =
                        format!("{round_trip_ms} ms, {gbit} Gbit/s: measured {share} of it in {took:?}");
                    assert!((0.5..=1.3).contains(&share), "{case}");
                    let whole = Duration::from_secs_f64(16.0 * round_trip_ms / 1e3);
                    let bytes = Duration::from_secs_f64((102 * LARGE) as f64 * 8.0 / gbit / 1e9);
                    assert!(took < whole + bytes, "{case}");
                }
            }
        }
    }

    #[test]
    fn short_link_is_measured_within_milliseconds() {
        for gbit in [1.0, 10.0, 100.0] {
            let (share, took) = measured(0.05, gbit, 90_000.0);
            assert!(
                (0.5..=1.3).contains(&share) && took < Duration::from_millis(5),
                "{gbit}: {share} {took:?}"
            );
        }
    }
}
