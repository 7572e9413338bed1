//! A small version of the collective protocol between ranks. Hosts exchange descriptors; streams move and order data.
//!
//! Each rank has a caller's stream and a communicator's stream. An operation starts after the caller's stream,
//! publishes *progress* to its peers and waits for theirs. It completes after the *reads done* of all peers that read
//! its input. Afterwards the caller may overwrite or free its input.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use smddp_cuda::{
    Address, Copy, Device, Element, Event, Export, Fold, Import, Imported, Reduction, Stream, Wait,
};

use crate::rank::Page;
use crate::world::{RecordedWait, World, become_process, download, faults, open_device, upload};

/// Bytes of a rank's block.
const BLOCK: usize = 96;
const OPERATIONS: u64 = 3;
const ABORT_VALUE: u64 = 1 << 62;

/// Words of one rank.
#[derive(Clone, Copy)]
enum Word {
    Progress,
    ReadsDone,
    Done,
}

fn word(page: &Page, rank: usize, which: Word) -> Address {
    page.word(rank * 8 + which as usize)
}

/// Permission to read the memory of a peer once the peer's progress word has reached `progress`.
#[derive(Clone, Copy)]
struct Descriptor {
    handle: [u8; 64],
    generation: u64,
    bytes: usize,
    progress: u64,
}

struct Rank<'a> {
    page: &'a Page,
    rank: usize,
    device: Arc<Device>,
    caller: Stream,
    stream: Stream,
    event: Event,
    /// Channels to and from each rank.
    to: Vec<Sender<Descriptor>>,
    from: Vec<Receiver<Descriptor>>,
    imported: HashMap<u64, Imported>,
    progress: u64,
}

/// A rank of the group has died.
#[derive(Debug)]
struct RankDied;

impl<'a> Rank<'a> {
    fn new(
        page: &'a Page,
        rank: usize,
        to: Vec<Sender<Descriptor>>,
        from: Vec<Receiver<Descriptor>>,
    ) -> Self {
        become_process(rank);
        let device = open_device(0);
        // SAFETY: the page outlives the world's streams.
        unsafe { device.register(page.memory(), 4096) }.unwrap();
        let [caller, stream] = [(); 2].map(|()| device.create_stream().unwrap());
        let event = device.create_event().unwrap();
        let imported = HashMap::new();
        Self { page, rank, device, caller, stream, event, to, from, imported, progress: 0 }
    }

    fn size(&self) -> usize {
        self.to.len()
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let (rank, size) = (self.rank, self.size());
        (1..size).map(move |k| (rank + k) % size)
    }

    fn copy(&self, stream: Stream, copies: &[Copy]) {
        // SAFETY: the world checks the lifetimes.
        unsafe { self.device.copy(stream, copies) }.unwrap();
    }

    fn write(&self, which: Word, value: u64) {
        // SAFETY: as in `copy`.
        unsafe { self.device.write_word(self.stream, word(self.page, self.rank, which), value) }.unwrap();
    }

    fn wait(&self, waits: &[Wait]) {
        // SAFETY: as in `copy`.
        unsafe { self.device.wait_words(self.stream, waits) }.unwrap();
    }

    /// Orders the second stream after the current work of the first.
    fn join(&self, first: Stream, second: Stream) {
        self.device.record(self.event, first).unwrap();
        self.device.wait_event(second, self.event).unwrap();
    }

    /// Publishes `memory`, written by the current work, to all peers.
    fn publish(&mut self, memory: Address) {
        self.progress += 1;
        self.write(Word::Progress, self.progress);
        let region = self.device.region(memory).unwrap();
        let Export::Legacy(handle) = self.device.export(&region).unwrap() else { panic!("a handle") };
        let (generation, bytes) = (region.generation, region.bytes);
        let descriptor = Descriptor { handle, generation, bytes, progress: self.progress };
        for peer in self.others() {
            // A dead peer does not receive.
            let _ = self.to[peer].send(descriptor);
        }
    }

    /// Receives each peer's published memory, and enqueues the waits for it.
    fn receive(&mut self) -> Result<Vec<(usize, Address)>, RankDied> {
        let mut found = Vec::new();
        for peer in self.others() {
            let descriptor = self.from[peer].recv().map_err(|_| RankDied)?;
            let device = &self.device;
            let imported = self.imported.entry(descriptor.generation).or_insert_with(|| {
                device.import(Import::Legacy(&descriptor.handle), descriptor.bytes).unwrap()
            });
            found.push((peer, imported.base));
            self.wait(&[Wait { word: word(self.page, peer, Word::Progress), value: descriptor.progress }]);
        }
        Ok(found)
    }

    /// Publishes that this rank has read its peers' memory, and waits until all peers have read.
    fn finish(&mut self, operation: u64) {
        self.write(Word::ReadsDone, operation);
        let of = |peer| Wait { word: word(self.page, peer, Word::ReadsDone), value: operation };
        let waits: Vec<Wait> = self.others().map(of).collect();
        self.wait(&waits);
        self.write(Word::Done, operation);
        self.join(self.stream, self.caller);
    }

    /// Copies every rank's block of `input` to `out`.
    fn all_gather(&mut self, operation: u64, input: Address, out: Address) -> Result<(), RankDied> {
        self.join(self.caller, self.stream);
        self.publish(input);
        let of = |rank: usize, from| Copy { to: out + (rank * BLOCK) as u64, from, bytes: BLOCK };
        let mut copies = vec![of(self.rank, input)];
        copies.extend(self.receive()?.into_iter().map(|(peer, from)| of(peer, from)));
        self.copy(self.stream, &copies);
        self.finish(operation);
        Ok(())
    }

    /// Sums the inputs: each rank reduces its block of all inputs, then gathers.
    fn all_reduce(&mut self, operation: u64, input: Address, out: Address) -> Result<(), RankDied> {
        self.join(self.caller, self.stream);
        self.publish(input);
        let mine = (self.rank * BLOCK) as u64;
        let mut sources = vec![input + mine];
        sources.extend(self.receive()?.into_iter().map(|(_, from)| from + mine));
        let reduction = Reduction {
            element: Element::U8,
            fold: Fold::Sum,
            sources,
            to: out + mine,
            count: BLOCK,
            divide: None,
            times: None,
        };
        // SAFETY: the world checks the lifetimes.
        unsafe { self.device.reduce(self.stream, &reduction) }.unwrap();
        self.publish(out);
        let of = |(peer, from): (usize, Address)| {
            let at = (peer * BLOCK) as u64;
            Copy { to: out + at, from: from + at, bytes: BLOCK }
        };
        let copies: Vec<Copy> = self.receive()?.into_iter().map(of).collect();
        self.copy(self.stream, &copies);
        self.finish(operation);
        Ok(())
    }

    fn run(&mut self, dead: bool) -> Result<Vec<Vec<u8>>, RankDied> {
        let bytes = BLOCK * self.size();
        let [input, out, result] = [(); 3].map(|()| self.device.allocate(bytes).unwrap());
        let sources: Vec<Address> = (1..=OPERATIONS).map(|_| self.device.allocate(bytes).unwrap()).collect();
        let results: Vec<Address> = (1..=OPERATIONS).map(|_| self.device.allocate(bytes).unwrap()).collect();
        let mut over = Ok(());
        for (operation, (source, kept)) in (1..).zip(sources.iter().zip(&results)) {
            upload(&self.device, *source, &vec![(operation * 10) as u8 + self.rank as u8; bytes]);
            // The caller's own work before the operation.
            self.copy(self.caller, &[Copy { to: input, from: *source, bytes }]);
            if dead && operation == 2 {
                return Err(RankDied);
            }
            over = match operation % 2 {
                1 => self.all_gather(operation, input, out),
                _ => self.all_reduce(operation, input, out),
            };
            if over.is_err() {
                break;
            }
            self.copy(self.caller, &[Copy { to: result, from: out, bytes }]);
            self.copy(self.caller, &[Copy { to: *kept, from: result, bytes }]);
            // The caller overwrites its output after the operation.
            self.copy(self.caller, &[Copy { to: out, from: *source, bytes }]);
        }
        if over.is_err() {
            // Releases all streams that are blocked in a wait.
            for rank in 0..self.size() {
                for which in [Word::Progress, Word::ReadsDone, Word::Done] {
                    // SAFETY: a word of the page.
                    unsafe { self.device.store(word(self.page, rank, which), ABORT_VALUE) };
                }
            }
        }
        self.device.synchronize(self.caller).unwrap();
        let found = match over {
            Ok(()) => Ok(results.iter().map(|kept| download(&self.device, *kept, bytes)).collect()),
            Err(error) => Err(error),
        };
        if found.is_ok() {
            // The caller's stream order is sufficient to free its memory.
            for memory in [input, out, result].iter().chain(&sources).chain(&results) {
                // SAFETY: the world checks whether it is in use.
                unsafe { self.device.free(*memory) };
            }
        }
        self.device.synchronize(self.stream).unwrap();
        self.imported.drain().for_each(|(_, imported)| self.device.close(imported));
        self.device.destroy_event(self.event);
        [self.caller, self.stream].into_iter().for_each(|stream| self.device.destroy_stream(stream));
        // SAFETY: as above.
        unsafe { self.device.unregister(self.page.memory()) };
        found
    }
}

/// Runs a group of `size` ranks as threads. Returns each rank's results, or that a rank died.
fn run(world: &World, page: &Page, size: usize, dead: Option<usize>) -> Vec<Result<Vec<Vec<u8>>, RankDied>> {
    let mut senders: Vec<Vec<Sender<Descriptor>>> = (0..size).map(|_| Vec::new()).collect();
    let mut receivers: Vec<Vec<Receiver<Descriptor>>> = Vec::new();
    for _ in 0..size {
        let (to, from): (Vec<_>, Vec<_>) = (0..size).map(|_| channel()).unzip();
        senders.iter_mut().zip(to).for_each(|(senders, to)| senders.push(to));
        receivers.push(from);
    }
    let ends = senders.into_iter().zip(receivers).enumerate();
    let found = std::thread::scope(|scope| {
        let threads: Vec<_> = ends
            .map(|(rank, (to, from))| {
                scope.spawn(move || Rank::new(page, rank, to, from).run(dead == Some(rank)))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // Streams may still use the page.
    world.end();
    found
}

fn expected(size: usize) -> Vec<Vec<u8>> {
    let of = |operation: u64| -> Vec<u8> {
        let given = |rank: usize| (operation * 10) as u8 + rank as u8;
        let sum = (0..size).map(given).fold(0, u8::wrapping_add);
        let block = |rank| if operation % 2 == 1 { given(rank) } else { sum };
        (0..size).flat_map(|rank| [block(rank); BLOCK]).collect()
    };
    (1..=OPERATIONS).map(of).collect()
}

#[test]
fn protocol_has_no_races_and_correct_results() {
    for seed in 0..200 {
        for size in 2..=5 {
            let world = World::seeded(seed);
            let page = Page::new();
            let found = run(&world, &page, size, None);
            let reports = world.reports();
            assert!(reports.is_empty(), "{size} ranks, seed {seed}:\n{}", reports.join("\n"));
            found.into_iter().for_each(|found| assert_eq!(found.unwrap(), expected(size)));
            // Only the waits for "reads done" may be enqueued before the writes that satisfy them.
            for wait in world.waits().into_iter().filter(|wait| wait.early) {
                assert_eq!(
                    (wait.word - page.word(0)) / 8 % 8,
                    Word::ReadsDone as u64,
                    "{}",
                    wait.description
                );
            }
            assert_eq!(world.leaks(), [""; 0]);
        }
    }
}

fn run_without_wait(size: usize, seed: usize, left_out: &str) -> (Vec<RecordedWait>, Vec<String>) {
    let settings = format!("FAKE_CUDA_SEED={} FAKE_CUDA_DROP={left_out}", seed + 1);
    let (world, page) = (World::new(&settings), Page::new());
    drop(run(&world, &page, size, None));
    (world.waits(), faults(&world.reports()))
}

#[test]
fn every_wait_of_the_protocol_is_needed_and_its_omission_is_detected() {
    for size in 2..=5 {
        let (waits, found) = run_without_wait(size, 0, "none");
        assert_eq!(found, [""; 0]);
        // Two events, one progress word of each peer per publication, and one "reads done" word of each peer.
        let each = |operation| 2 + (size - 1) * if operation % 2 == 1 { 2 } else { 3 };
        assert_eq!(waits.len(), size * (1..=OPERATIONS).map(each).sum::<usize>());
        for (seed, wait) in waits.iter().enumerate() {
            assert!(wait.needed, "{}", wait.description);
            let (_, found) = run_without_wait(size, seed, &wait.id);
            assert!(!found.is_empty(), "{size} ranks, seed {seed}: no error without {}", wait.description);
        }
    }
}

#[test]
fn abort_value_releases_survivors_without_errors() {
    for seed in 0..50 {
        let (world, page) = (World::seeded(seed), Page::new());
        let found = run(&world, &page, 3, Some(1));
        assert!(found.iter().all(Result::is_err));
        let reports = world.reports();
        assert!(reports.is_empty(), "seed {seed}:\n{}", reports.join("\n"));
    }
}
