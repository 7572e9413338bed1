//! What trains of messages say about a link's rate.
//!
//! A connection begins slowly: at first it has a few packets under way and waits for word of them, and each round trip it
//! has about twice as many. Where a round trip is short nothing is seen of that. On a long way a train is over before the
//! link was ever full, and bytes over time is a small part of the rate. So there trains go on, each several times as long as
//! the one before, while they still find more; and what counts is how quickly the second half of one comes in, by
//! when the connection has got going.

use std::time::Duration;

use super::nanos;

/// Bytes of a train's messages: such a one is under way at once, without being asked for.
pub(super) const LARGE: usize = 64 << 10;
/// Messages of a train that nobody times: a shaped link lets about as much through at any speed.
const WARM: usize = 2;
/// Of the trains that are timed, the next one only where the one before says too little. The last one keeps to what a
/// receiver takes without having asked for it.
const TRAINS: [usize; 3] = [4, 32, 96];
/// A shorter time cannot be measured.
const LONG_ENOUGH: Duration = Duration::from_millis(1);
/// Round trips in which a connection has certainly got going.
const GOING: u32 = 8;
/// A longer train that finds no more than this many times as much has found the rate.
const MORE: f64 = 1.25;

/// The measurement of one link.
pub(super) struct Gauge {
    round_trip: Duration,
    trains: usize,
    done: bool,
    rate: f64,
}

impl Gauge {
    pub(super) fn new(round_trip: Duration) -> Self {
        Self { round_trip, trains: 0, done: false, rate: 0.0 }
    }

    /// Messages of the next train.
    pub(super) fn next(&self) -> Option<usize> {
        let timed = || TRAINS.get(self.trains - 1).copied();
        if self.trains == 0 { Some(WARM) } else { timed().filter(|_| !self.done) }
    }

    /// Word of the first half of a train of `messages` came after `half`, of the whole after `whole`.
    pub(super) fn add(&mut self, messages: usize, half: Duration, whole: Duration) {
        self.trains += 1;
        if messages <= WARM {
            return;
        }
        let bytes = (messages * LARGE) as f64;
        // The end of the last one's way and the answer's are no part of it; but no more than half of it is that.
        let all = bytes / nanos(whole.saturating_sub(self.round_trip).max(whole / 2));
        if whole > LONG_ENOUGH && whole > GOING * self.round_trip {
            (self.rate, self.done) = (all, true);
            return;
        }
        let second = bytes / 2.0 / nanos(whole.saturating_sub(half));
        // Word of the first half may be late: then the second seems quicker than it was.
        let found = if whole > LONG_ENOUGH { second.clamp(all, 2.0 * all) } else { all };
        self.done = whole > LONG_ENOUGH && self.rate > 0.0 && found < MORE * self.rate;
        self.rate = self.rate.max(found);
    }

    /// Bytes in a nanosecond.
    pub(super) fn rate(&self) -> f64 {
        self.rate
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection as it begins: `window` bytes under way, and as many more as were acknowledged.
    struct Beginning {
        round_trip: f64,
        bytes_per_ns: f64,
        window: f64,
    }

    impl Beginning {
        /// When word of so many bytes, in a row, has come back; then the window has grown by them.
        fn train(&mut self, bytes: f64) -> Duration {
            let (mut left, mut at) = (bytes, 0.0);
            while left > 0.0 {
                let burst = left.min(self.window);
                let busy = burst / self.bytes_per_ns;
                left -= burst;
                // A full link goes on with the rest; one that is not waits for the first word.
                at += if left > 0.0 { busy.max(self.round_trip) } else { busy + self.round_trip };
                self.window += burst;
            }
            Duration::from_nanos(at as u64)
        }
    }

    /// (what is found in terms of the rate, the time that it took).
    fn measured(round_trip_ms: f64, gbit: f64, first: f64) -> (f64, Duration) {
        let mut link = Beginning { round_trip: round_trip_ms * 1e6, bytes_per_ns: gbit / 8.0, window: first };
        let mut gauge = Gauge::new(Duration::from_nanos(link.round_trip as u64));
        let mut took = Duration::ZERO;
        while let Some(messages) = gauge.next() {
            let bytes = (messages * LARGE) as f64;
            let half = Beginning { ..link }.train(bytes / 2.0);
            let whole = link.train(bytes);
            gauge.add(messages, half, whole);
            took += whole;
        }
        (gauge.rate() / link.bytes_per_ns, took)
    }

    #[test]
    fn a_link_that_begins_slowly_is_measured_at_its_rate() {
        for round_trip_ms in [0.03, 0.1, 1.0, 5.0, 10.0, 20.0, 50.0] {
            for gbit in [0.1, 0.3, 1.0] {
                for first in [14_600.0, 90_000.0] {
                    let (share, took) = measured(round_trip_ms, gbit, first);
                    let what = format!("{round_trip_ms} ms, {gbit} Gbit/s: {share} of it in {took:?}");
                    assert!((0.5..=1.3).contains(&share), "{what}");
                    let whole = Duration::from_secs_f64(16.0 * round_trip_ms / 1e3);
                    let bytes = Duration::from_secs_f64((102 * LARGE) as f64 * 8.0 / gbit / 1e9);
                    assert!(took < whole + bytes, "{what}");
                }
            }
        }
    }

    #[test]
    fn a_near_link_costs_few_milliseconds() {
        for gbit in [1.0, 10.0, 100.0] {
            let (share, took) = measured(0.05, gbit, 90_000.0);
            assert!(
                (0.5..=1.3).contains(&share) && took < Duration::from_millis(5),
                "{gbit}: {share} {took:?}"
            );
        }
    }
}
