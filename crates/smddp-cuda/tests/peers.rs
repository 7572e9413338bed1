//! Two processes that read each other's memory, in the order that words give: what the executor does, at its smallest.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod common;

use std::os::unix::net::UnixStream;

use common::*;
use smddp_cuda::{Copy, Device, Element, Export, Fold, Import, Reduction, Wait};

const TURNS: u64 = 200;
const FLOATS: usize = 1024;
const BYTES: usize = FLOATS * size_of::<f32>();

/// What a rank contributes in a turn.
fn value(rank: u64, turn: u64) -> f32 {
    (rank * 1000 + turn) as f32
}

/// Where a turn's bytes lie.
fn place(base: u64, turn: u64) -> u64 {
    base + turn * BYTES as u64
}

/// Turns of: mine into my buffer; tell; wait for the peer's; theirs and mine to where they are gathered; the sum of
/// both; tell that theirs was read; wait until mine was. All is enqueued at once, and no thread waits but the streams.
fn run(rank: u64, peer: &UnixStream, memory: *mut u8) {
    let device: &Device = &device(0);
    device.prepare().unwrap();
    let stream = device.create_stream().unwrap();
    // SAFETY: the page, and all memory below, lives until the stream is empty.
    unsafe {
        let page = device.register(memory, 4096).unwrap();
        let (progress, read) = (|rank: u64| page + 16 * rank, |rank: u64| page + 16 * rank + 8);
        let inputs: Vec<u8> =
            (0..TURNS).flat_map(|turn| value(rank, turn).to_le_bytes().repeat(FLOATS)).collect();
        let inputs = host(device, &inputs);
        let (gathered, summed) = (
            host(device, &vec![0; 2 * TURNS as usize * BYTES]),
            host(device, &vec![0; TURNS as usize * BYTES]),
        );
        let (mine, sum) = (device.allocate(BYTES).unwrap(), device.allocate(BYTES).unwrap());
        let Export::Legacy(handle) = device.export(&device.region(mine).unwrap()).unwrap() else { panic!() };
        say(peer, &handle);
        let theirs = device.import(Import::Legacy(&hear::<64>(peer)), BYTES).unwrap();
        for turn in 0..TURNS {
            let (to, copy) = (2 * turn, |to, from| Copy { to, from, bytes: BYTES });
            device.copy(stream, &[copy(mine, place(inputs, turn))]).unwrap();
            device.write_word(stream, progress(rank), turn + 1).unwrap();
            device.wait_words(stream, &[Wait { word: progress(1 - rank), value: turn + 1 }]).unwrap();
            let copies =
                [copy(place(gathered, to + rank), mine), copy(place(gathered, to + 1 - rank), theirs.base)];
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
            device.copy(stream, &[copy(place(summed, turn), sum)]).unwrap();
            device.write_word(stream, read(rank), turn + 1).unwrap();
            device.wait_words(stream, &[Wait { word: read(1 - rank), value: turn + 1 }]).unwrap();
        }
        device.synchronize(stream).unwrap();
        let floats =
            |at, values: [f32; 1]| assert_eq!(bytes(at, BYTES), values[0].to_le_bytes().repeat(FLOATS));
        for turn in 0..TURNS {
            floats(place(gathered, 2 * turn), [value(0, turn)]);
            floats(place(gathered, 2 * turn + 1), [value(1, turn)]);
            floats(place(summed, turn), [value(0, turn) + value(1, turn)]);
        }
        // Neither closes or frees what the other may still be reading.
        say(peer, &[1]);
        assert_eq!(hear::<1>(peer), [1]);
        device.close(theirs);
        device.free(mine);
        device.free(sum);
        device.unregister(memory);
    }
}

#[test]
fn two_processes_gather_and_sum_from_each_others_memory_without_a_thread_that_waits() {
    let name = "two_processes_gather_and_sum_from_each_others_memory_without_a_thread_that_waits";
    // Old and new drivers, and delays that differ.
    for settings in [("13000", "1"), ("12000", "2"), ("12080", "3")] {
        let settings = [("FAKE_CUDA_VERSION", settings.0), ("FAKE_CUDA_SEED", settings.1)];
        with_peer(
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
