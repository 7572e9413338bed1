//! OSU's point-to-point tests between the first and the second half of the ranks: latency, bw, bibw, message_rate.

use std::time::Instant;

use smddp_core::{DType, RedOp};

use crate::buffers::Buffer;
use crate::calls::{BenchGroup, Stream};
use crate::cli::Cli;
use crate::error::Result;
use crate::pattern::{Pattern, UNWRITTEN};
use crate::periter::PerIter;
use crate::row::{Measure, Osu, Row, Summary};
use crate::task::Test;

/// Bytes of the receive buffer, which holds at least two messages. It fits into the cache, like OSU's single buffer.
const RECEIVE_BUFFER: usize = 16 << 20;

/// Returns the number of messages of a pair in the reported time: one iteration, or half a round trip.
fn messages(test: Test, window: usize) -> usize {
    match test {
        Test::Latency => 1,
        Test::Bandwidth | Test::Rate => window,
        Test::Bidirectional => 2 * window,
    }
}

/// Measures the test with the options of `cli` on all ranks. Calls `row` for every row on every rank.
pub(crate) fn measure(
    group: &BenchGroup,
    test: Test,
    cli: &Cli,
    row: &mut dyn FnMut(&Row) -> Result<()>,
) -> Result<Summary> {
    let pairs = group.size() / 2;
    let leads = group.rank() < pairs;
    let peer = if leads { group.rank() + pairs } else { group.rank() - pairs };
    let sizes = cli.sizes(1);
    let most = sizes.last().copied().unwrap_or(0);
    let window = if test == Test::Latency { 1 } else { cli.window as usize };
    let mut buffers = (
        Buffer::new(most)?,
        Buffer::new(most.saturating_mul(window).min(RECEIVE_BUFFER.max(2 * most)).max(1))?,
    );
    let mut summary = Summary::default();
    let mut rows = 0;
    for _ in cli.cycles() {
        for &bytes in &sizes {
            let slots = (buffers.1.capacity() / bytes.max(1)).min(window);
            buffers.0.set_used(bytes);
            buffers.1.set_used((slots * bytes).max(1));
            let stream = Stream::new(group, peer, bytes, (&mut buffers.0, &mut buffers.1));
            let mut pair = Pair { group, test, leads, peer, window, bytes, stream };
            let found = pair.measure(cli, pairs, rows)?;
            rows += 1;
            summary.failed += u64::from(found.out_of_place.wrong.is_some_and(|wrong| wrong > 0));
            summary.busbw += found.out_of_place.busbw;
            row(&found)?;
        }
    }
    summary.busbw /= (rows as f64).max(1.0);
    Ok(summary)
}

/// This rank and its peer.
struct Pair<'a> {
    group: &'a BenchGroup,
    test: Test,
    /// This rank times the iterations, and sends in unidirectional tests.
    leads: bool,
    peer: usize,
    window: usize,
    bytes: usize,
    stream: Stream<'a>,
}

impl Pair<'_> {
    fn measure(&mut self, cli: &Cli, pairs: usize, seed: u64) -> Result<Row> {
        let (warmup, iters) = cli.counts(self.bytes);
        (0..warmup).try_for_each(|_| self.once())?;
        self.group.barrier()?;
        let mut each = Vec::new();
        let begun = Instant::now();
        let mut before = begun;
        for _ in 0..iters {
            self.once()?;
            if cli.per_iter == 1 {
                let now = Instant::now();
                each.push((now - before).as_secs_f64() * self.share());
                before = now;
            }
        }
        let mine = begun.elapsed().as_secs_f64() * self.share() / iters as f64;
        let seconds = self.group.reduce_f64(if self.leads { mine } else { 0.0 }, RedOp::Sum)? / pairs as f64;
        let per_iter =
            (cli.per_iter == 1).then(|| PerIter::gathered(self.group, &each, pairs, cli)).transpose()?;
        let mut wrong = None;
        for number in 0..cli.check as u64 {
            let found = self.wrong((seed << 16) + number)?;
            wrong = Some(wrong.unwrap_or(0) + self.group.sum_u64(found)?);
        }
        let messages_per_s = (pairs * messages(self.test, self.window)) as f64 / seconds;
        let mb_per_s = messages_per_s * self.bytes as f64 / 1e6;
        let (algbw, busbw) = (mb_per_s / 1e3, mb_per_s / 1e3);
        let out_of_place = Measure { seconds, algbw, busbw, wrong, per_iter };
        Ok(Row {
            bytes: self.bytes,
            count: self.bytes,
            dtype: "uint8",
            redop: "none",
            root: -1,
            in_place: Measure { wrong: None, ..out_of_place.clone() },
            out_of_place,
            path: None,
            osu: Some(Osu::Messages { mb_per_s, messages_per_s }),
        })
    }

    /// Returns the reported part of an iteration's time.
    fn share(&self) -> f64 {
        if self.test == Test::Latency { 0.5 } else { 1.0 }
    }

    fn once(&mut self) -> Result<()> {
        let Pair { test, leads, window, ref mut stream, .. } = *self;
        match (test, leads) {
            (Test::Latency, true) => stream.send().and_then(|()| stream.receive()),
            (Test::Latency, false) => stream.receive().and_then(|()| stream.send()),
            (Test::Bandwidth | Test::Rate, true) => {
                stream.window(window, 0).and_then(|()| stream.wait_reply())
            }
            (Test::Bandwidth | Test::Rate, false) => stream.window(0, window).and_then(|()| stream.reply()),
            (Test::Bidirectional, _) => stream.window(window, window),
        }
    }

    /// Returns the number of wrong bytes of an iteration with new data, in all slots and in the guards.
    fn wrong(&mut self, seed: u64) -> Result<u64> {
        let pattern = Pattern { dtype: DType::U8, redop: None, ranks: self.group.size(), format: None, seed };
        pattern.of_input(self.group.rank(), 0, self.bytes).fill(self.stream.out().bytes());
        self.stream.received().bytes().fill(UNWRITTEN);
        self.once()?;
        let expected = pattern.of_input(self.peer, 0, self.bytes);
        let receives = match self.test {
            Test::Bandwidth | Test::Rate if self.leads => 0,
            _ => self.window.min(self.stream.slots()),
        };
        let found = self.stream.received().bytes();
        let wrong: u64 = (0..receives)
            .map(|slot| expected.wrong(&found[slot * self.bytes..(slot + 1) * self.bytes]))
            .sum();
        Ok(wrong + (self.stream.received().overwritten() + self.stream.out().overwritten()) as u64)
    }
}
