//! Two processes that read each other's memory, ordered by words: the executor's protocol at minimum size.

#![allow(clippy::unwrap_used, reason = "test helpers")]

mod common;

use std::os::unix::net::UnixStream;

use common::*;
use smddp_cuda::{Copy, Device, Element, Export, Fold, Import, Reduction, Wait};

const ITERATIONS: u64 = 200;
const FLOATS: usize = 1024;
const BYTES: usize = FLOATS * size_of::<f32>();

/// Contribution of a rank to an iteration.
fn value(rank: u64, iteration: u64) -> f32 {
    (rank * 1000 + iteration) as f32
}

/// Address of an iteration's data.
fn block(base: u64, iteration: u64) -> u64 {
    base + iteration * BYTES as u64
}

/// Runs the iterations of one rank. Each copies the input to the exported buffer, publishes progress and waits for
/// the peer. It then gathers both buffers, sums them, publishes "read" and waits until the peer has read. Everything
/// is enqueued in advance, and only the streams wait.
fn run(rank: u64, peer: &UnixStream, memory: *mut u8) {
    let device: &Device = &device(0);
    device.prepare().unwrap();
    let stream = device.create_stream().unwrap();
    // SAFETY: the page and all memory below remain allocated until the stream is empty.
    unsafe {
        let page = device.register(memory, 4096).unwrap();
        let (progress, read) = (|rank: u64| page + 16 * rank, |rank: u64| page + 16 * rank + 8);
        let inputs: Vec<u8> = (0..ITERATIONS)
            .flat_map(|iteration| value(rank, iteration).to_le_bytes().repeat(FLOATS))
            .collect();
        let inputs = host(device, &inputs);
        let (gathered, summed) = (
            host(device, &vec![0; 2 * ITERATIONS as usize * BYTES]),
            host(device, &vec![0; ITERATIONS as usize * BYTES]),
        );
        let (mine, sum) = (device.allocate(BYTES).unwrap(), device.allocate(BYTES).unwrap());
        let Export::Legacy(handle) = device.export(&device.region(mine).unwrap()).unwrap() else { panic!() };
        write_bytes(peer, &handle);
        let theirs = device.import(Import::Legacy(&read_bytes::<64>(peer)), BYTES).unwrap();
        for iteration in 0..ITERATIONS {
            let (to, copy) = (2 * iteration, |to, from| Copy { to, from, bytes: BYTES });
            device.copy(stream, &[copy(mine, block(inputs, iteration))]).unwrap();
            device.write_word(stream, progress(rank), iteration + 1).unwrap();
            device.wait_words(stream, &[Wait { word: progress(1 - rank), value: iteration + 1 }]).unwrap();
            let copies =
                [copy(block(gathered, to + rank), mine), copy(block(gathered, to + 1 - rank), theirs.base)];
            device.copy(stream, &copies).unwrap();
            let reduction = Reduction {
                element: Element::F32,
                fold: Fold::Sum,
                sources: vec![mine, theirs.base],
                to: sum,
                count: FLOATS,
                divide: None,
                times: None,
            };
            device.reduce(stream, &reduction).unwrap();
            device.copy(stream, &[copy(block(summed, iteration), sum)]).unwrap();
            device.write_word(stream, read(rank), iteration + 1).unwrap();
            device.wait_words(stream, &[Wait { word: read(1 - rank), value: iteration + 1 }]).unwrap();
        }
        device.synchronize(stream).unwrap();
        let floats =
            |at, values: [f32; 1]| assert_eq!(bytes(at, BYTES), values[0].to_le_bytes().repeat(FLOATS));
        for iteration in 0..ITERATIONS {
            floats(block(gathered, 2 * iteration), [value(0, iteration)]);
            floats(block(gathered, 2 * iteration + 1), [value(1, iteration)]);
            floats(block(summed, iteration), [value(0, iteration) + value(1, iteration)]);
        }
        // Each rank closes and frees memory only after the peer has finished reading.
        write_bytes(peer, &[1]);
        assert_eq!(read_bytes::<1>(peer), [1]);
        device.close(theirs);
        device.free(mine);
        device.free(sum);
        device.unregister(memory);
    }
}

#[test]
fn two_processes_gather_and_sum_without_a_waiting_thread() {
    let name = "two_processes_gather_and_sum_without_a_waiting_thread";
    // Old and new drivers, with different delays.
    for settings in [("13000", "1"), ("12000", "2"), ("12080", "3")] {
        let settings = [("FAKE_CUDA_VERSION", settings.0), ("FAKE_CUDA_SEED", settings.1)];
        in_two_children(
            name,
            &settings,
            |peer| {
                let fd = memfd();
                let memory = page(&fd);
                send(peer, &fd);
                run(0, peer, memory);
            },
            |peer| run(1, peer, page(&receive(peer))),
        );
    }
}
