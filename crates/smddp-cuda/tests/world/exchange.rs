//! The protocol of collectives between ranks, in small: descriptors by the hosts, data and order by the streams.
//!
//! Each rank has a caller's stream and a communicator's. An operation takes what the caller's stream made, writes
//! *progress* where others may read, waits for theirs, and does not end before its readers' *reads done*. So after it
//! the caller may write its input again, or free it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use smddp_cuda::{
    Address, Copy, Device, Element, Event, Export, Fold, Import, Imported, Reduction, Stream, Wait,
};

use crate::rank::Page;
use crate::world::{Seen, World, become_process, download, faults, open_device, upload};

/// Bytes of a rank's block.
const BLOCK: usize = 96;
const OPERATIONS: u64 = 3;
const POISON: u64 = 1 << 62;

/// A rank's words.
#[derive(Clone, Copy)]
enum Word {
    Progress,
    ReadsDone,
    Done,
}

fn word(page: &Page, rank: usize, which: Word) -> Address {
    page.word(rank * 8 + which as usize)
}

/// "You may read this of mine once my progress has reached that."
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
    /// To and from each rank.
    to: Vec<Sender<Descriptor>>,
    from: Vec<Receiver<Descriptor>>,
    imported: HashMap<u64, Imported>,
    progress: u64,
}

/// A rank of the group is gone.
#[derive(Debug)]
struct Gone;

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
        // SAFETY: the world checks how long it lives.
        unsafe { self.device.copy(stream, copies) }.unwrap();
    }

    fn write(&self, which: Word, value: u64) {
        // SAFETY: as above.
        unsafe { self.device.write_word(self.stream, word(self.page, self.rank, which), value) }.unwrap();
    }

    fn wait(&self, waits: &[Wait]) {
        // SAFETY: as above.
        unsafe { self.device.wait_words(self.stream, waits) }.unwrap();
    }

    /// The second stream goes on after the first.
    fn join(&self, first: Stream, second: Stream) {
        self.device.record(self.event, first).unwrap();
        self.device.wait_event(second, self.event).unwrap();
    }

    /// The work so far made `memory`, all of which others may read.
    fn publish(&mut self, memory: Address) {
        self.progress += 1;
        self.write(Word::Progress, self.progress);
        let region = self.device.region(memory).unwrap();
        let Export::Legacy(handle) = self.device.export(&region).unwrap() else { panic!("a handle") };
        let (generation, bytes) = (region.generation, region.bytes);
        let descriptor = Descriptor { handle, generation, bytes, progress: self.progress };
        for peer in self.others() {
            // Who is gone does not read.
            let _ = self.to[peer].send(descriptor);
        }
    }

    /// What each other rank published, behind the waits for it.
    fn receive(&mut self) -> Result<Vec<(usize, Address)>, Gone> {
        let mut found = Vec::new();
        for peer in self.others() {
            let descriptor = self.from[peer].recv().map_err(|_| Gone)?;
            let device = &self.device;
            let imported = self.imported.entry(descriptor.generation).or_insert_with(|| {
                device.import(Import::Legacy(&descriptor.handle), descriptor.bytes).unwrap()
            });
            found.push((peer, imported.base));
            self.wait(&[Wait { word: word(self.page, peer, Word::Progress), value: descriptor.progress }]);
        }
        Ok(found)
    }

    /// This rank has read what it wanted; nobody reads of it any more.
    fn finish(&mut self, operation: u64) {
        self.write(Word::ReadsDone, operation);
        let of = |peer| Wait { word: word(self.page, peer, Word::ReadsDone), value: operation };
        let waits: Vec<Wait> = self.others().map(of).collect();
        self.wait(&waits);
        self.write(Word::Done, operation);
        self.join(self.stream, self.caller);
    }

    /// Every rank's block of `input` to `out`.
    fn all_gather(&mut self, operation: u64, input: Address, out: Address) -> Result<(), Gone> {
        self.join(self.caller, self.stream);
        self.publish(input);
        let of = |rank: usize, from| Copy { to: out + (rank * BLOCK) as u64, from, bytes: BLOCK };
        let mut copies = vec![of(self.rank, input)];
        copies.extend(self.receive()?.into_iter().map(|(peer, from)| of(peer, from)));
        self.copy(self.stream, &copies);
        self.finish(operation);
        Ok(())
    }

    /// Sums: each rank reduces its block of all inputs, then gathers.
    fn all_reduce(&mut self, operation: u64, input: Address, out: Address) -> Result<(), Gone> {
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
        // SAFETY: the world checks how long it lives.
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

    fn run(&mut self, dies: bool) -> Result<Vec<Vec<u8>>, Gone> {
        let bytes = BLOCK * self.size();
        let [input, out, result] = [(); 3].map(|()| self.device.allocate(bytes).unwrap());
        let sources: Vec<Address> = (1..=OPERATIONS).map(|_| self.device.allocate(bytes).unwrap()).collect();
        let results: Vec<Address> = (1..=OPERATIONS).map(|_| self.device.allocate(bytes).unwrap()).collect();
        let mut over = Ok(());
        for (operation, (source, kept)) in (1..).zip(sources.iter().zip(&results)) {
            upload(&self.device, *source, &vec![(operation * 10) as u8 + self.rank as u8; bytes]);
            // The caller's own work before and after.
            self.copy(self.caller, &[Copy { to: input, from: *source, bytes }]);
            if dies && operation == 2 {
                return Err(Gone);
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
            // The caller may write its output again too.
            self.copy(self.caller, &[Copy { to: out, from: *source, bytes }]);
        }
        if over.is_err() {
            // Lets all streams go that stand at a wait.
            for rank in 0..self.size() {
                for which in [Word::Progress, Word::ReadsDone, Word::Done] {
                    // SAFETY: a word of the page.
                    unsafe { self.device.store(word(self.page, rank, which), POISON) };
                }
            }
        }
        self.device.synchronize(self.caller).unwrap();
        let found = match over {
            Ok(()) => Ok(results.iter().map(|kept| download(&self.device, *kept, bytes)).collect()),
            Err(gone) => Err(gone),
        };
        if found.is_ok() {
            // The caller's own order is enough to free its memory.
            for memory in [input, out, result].iter().chain(&sources).chain(&results) {
                // SAFETY: whether it is in use is what the world is asked.
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

/// All ranks of a group of `size` as threads; each one's results, or that somebody was gone.
fn run(world: &World, page: &Page, size: usize, dies: Option<usize>) -> Vec<Result<Vec<Vec<u8>>, Gone>> {
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
                scope.spawn(move || Rank::new(page, rank, to, from).run(dies == Some(rank)))
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
fn ranks_that_keep_the_protocol_have_no_race_and_the_right_bytes() {
    for seed in 0..200 {
        for size in 2..=5 {
            let world = World::seeded(seed);
            let page = Page::new();
            let found = run(&world, &page, size, None);
            let reports = world.reports();
            assert!(reports.is_empty(), "{size} ranks, seed {seed}:\n{}", reports.join("\n"));
            found.into_iter().for_each(|found| assert_eq!(found.unwrap(), expected(size)));
            // Only for the end of others' reads is there a wait before those are enqueued.
            for wait in world.waits().into_iter().filter(|wait| wait.early) {
                assert_eq!((wait.word - page.word(0)) / 8 % 8, Word::ReadsDone as u64, "{}", wait.what);
            }
            assert_eq!(world.leaks(), [""; 0]);
        }
    }
}

fn with_wait_left_out(size: usize, seed: usize, left_out: &str) -> (Vec<Seen>, Vec<String>) {
    let settings = format!("FAKE_CUDA_SEED={} FAKE_CUDA_DROP={left_out}", seed + 1);
    let (world, page) = (World::new(&settings), Page::new());
    drop(run(&world, &page, size, None));
    (world.waits(), faults(&world.reports()))
}

#[test]
fn every_wait_of_the_protocol_is_needed_and_missed() {
    for size in 2..=5 {
        let (waits, found) = with_wait_left_out(size, 0, "none");
        assert_eq!(found, [""; 0]);
        // Two events; a progress word of each other rank for every time it publishes; its reads done.
        let each = |operation| 2 + (size - 1) * if operation % 2 == 1 { 2 } else { 3 };
        assert_eq!(waits.len(), size * (1..=OPERATIONS).map(each).sum::<usize>());
        for (seed, wait) in waits.iter().enumerate() {
            assert!(wait.needed, "{}", wait.what);
            let (_, found) = with_wait_left_out(size, seed, &wait.id);
            assert!(!found.is_empty(), "{size} ranks, seed {seed}: nobody misses {}", wait.what);
        }
    }
}

#[test]
fn whoever_loses_a_rank_is_let_go_by_poison_and_leaves_in_order() {
    for seed in 0..50 {
        let (world, page) = (World::seeded(seed), Page::new());
        let found = run(&world, &page, 3, Some(1));
        assert!(found.iter().all(Result::is_err));
        let reports = world.reports();
        assert!(reports.is_empty(), "seed {seed}:\n{}", reports.join("\n"));
    }
}
