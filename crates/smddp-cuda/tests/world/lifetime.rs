//! Lifetimes of memory, imports, handles and streams.

use smddp_cuda::{Error, Export, Import};

use crate::rank::{BYTES, Page, Rank};
use crate::world::{World, assert_clean, faults, query};

#[test]
fn free_of_memory_in_use_by_a_stream_is_detected() {
    for seed in 0..50 {
        for synchronize in [true, false] {
            let world = World::seeded(seed);
            let rank = Rank::new(&world);
            let (a, b) = (rank.memory(1), rank.memory(2));
            rank.copy(a, b);
            if synchronize {
                rank.synchronize();
            }
            // SAFETY: the world checks whether it is in use.
            unsafe { rank.device.free(a) };
            let found = faults(&world.end());
            assert_eq!(found, if synchronize { vec![] } else { vec!["Freed"] }, "seed {seed}");
        }
    }
}

#[test]
fn free_before_a_peer_has_read_is_detected() {
    for seed in 0..50 {
        for wait in [true, false] {
            let (world, page) = (World::seeded(seed), Page::new());
            let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
            let (to, out) = (a.memory(1), b.memory(2));
            let peer = b.import(&a, to);
            world.settle();
            b.copy(peer, out);
            b.write(page.word(0), 1);
            if wait {
                a.wait(page.word(0), 1);
                a.synchronize();
            }
            // SAFETY: as above.
            unsafe { a.device.free(to) };
            let found = faults(&world.end());
            assert_eq!(found, if wait { vec![] } else { vec!["Freed"] }, "seed {seed}");
        }
    }
}

#[test]
fn import_of_freed_memory_is_an_error_only_when_used() {
    let world = World::seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let (to, out) = (a.memory(1), b.memory(2));
    let peer = b.import(&a, to);
    // SAFETY: unused.
    unsafe { a.device.free(to) };
    assert_eq!(faults(&world.reports()), [""; 0]);
    b.copy(peer, out);
    assert_eq!(faults(&world.end()), ["Freed"]);
}

#[test]
fn close_of_an_import_in_use_is_detected() {
    for seed in 0..50 {
        for synchronize in [true, false] {
            let world = World::seeded(seed);
            let (a, b) = (Rank::new(&world), Rank::new(&world));
            let (to, out) = (a.memory(1), b.memory(2));
            world.settle();
            let region = a.device.region(to).unwrap();
            let Export::Legacy(handle) = a.device.export(&region).unwrap() else { panic!("a handle") };
            let imported = b.device.import(Import::Legacy(&handle), BYTES).unwrap();
            b.copy(imported.base, out);
            if synchronize {
                b.synchronize();
            }
            b.device.close(imported);
            let found = faults(&world.end());
            assert_eq!(found, if synchronize { vec![] } else { vec!["Closed"] }, "seed {seed}");
        }
    }
}

#[test]
fn handle_opened_twice_needs_two_closes() {
    let world = World::seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let (to, out) = (a.memory(1), b.memory(2));
    world.settle();
    let region = a.device.region(to).unwrap();
    let Export::Legacy(handle) = a.device.export(&region).unwrap() else { panic!("a handle") };
    let first = b.device.import(Import::Legacy(&handle), BYTES).unwrap();
    let second = b.device.import(Import::Legacy(&handle), BYTES).unwrap();
    assert_eq!(first, second);
    b.device.close(first);
    b.copy(second.base, out);
    b.synchronize();
    b.device.close(second);
    assert_eq!(faults(&world.reports()), [""; 0]);
    b.device.close(second);
    assert_eq!(faults(&world.reports()), ["Misuse"]);
    let copy = smddp_cuda::Copy { to: out, from: first.base, bytes: 1 };
    // SAFETY: the driver rejects closed memory.
    let late = unsafe { b.device.copy(b.stream, &[copy]) };
    assert!(matches!(late, Err(Error::Driver { code: 1, .. })));
    assert_eq!(faults(&world.end()), ["Misuse", "Unknown"]);
}

#[test]
fn address_of_another_rank_is_rejected() {
    let world = World::seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let (theirs, mine) = (a.memory(1), b.memory(2));
    let copy = smddp_cuda::Copy { to: mine, from: theirs, bytes: BYTES };
    // SAFETY: the driver rejects it.
    assert!(unsafe { b.device.copy(b.stream, &[copy]) }.is_err());
    // Addresses after the end of the rank's own memory are invalid too.
    let copy = smddp_cuda::Copy { to: mine, from: mine + 8, bytes: BYTES };
    // SAFETY: as above.
    assert!(unsafe { b.device.copy(b.stream, &[copy]) }.is_err());
    assert_eq!(faults(&world.end()), ["Unknown", "Unknown"]);
}

#[test]
fn unregistering_words_in_use_is_detected() {
    for seed in 0..20 {
        for synchronize in [true, false] {
            let (world, page) = (World::seeded(seed), Page::new());
            let rank = Rank::with(&world, &page);
            rank.write(page.word(0), 1);
            if synchronize {
                rank.synchronize();
            }
            // SAFETY: the world checks whether it is in use.
            unsafe { rank.device.unregister(page.memory()) };
            let found = faults(&world.end());
            assert_eq!(found, if synchronize { vec![] } else { vec!["Freed"] }, "seed {seed}");
        }
    }
}

#[test]
fn double_free_and_foreign_handles_are_reported() {
    let world = World::seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let memory = a.device.allocate(BYTES).unwrap();
    // SAFETY: the driver rejects the invalid calls.
    unsafe {
        a.device.free(memory + 1);
        a.device.free(memory);
        a.device.free(memory);
    }
    assert!(b.device.synchronize(a.stream).is_err());
    let event = a.device.create_event().unwrap();
    a.device.destroy_event(event);
    assert!(a.device.record(event, a.stream).is_err());
    assert_eq!(faults(&world.end()), ["Misuse"; 4]);
}

#[test]
fn read_of_uninitialized_device_memory_is_reported() {
    let world = World::seeded(0);
    let rank = Rank::new(&world);
    let (a, b) = (rank.device.allocate(BYTES).unwrap(), rank.memory(2));
    rank.copy(a, b);
    rank.copy(a, b);
    assert_eq!(faults(&world.end()), ["Unwritten"]);
}

#[test]
fn blocked_stream_is_reported_and_delays_no_other() {
    let page = Page::new();
    let world = World::new("FAKE_CUDA_PATIENCE=100");
    let rank = Rank::with(&world, &page);
    let (a, b) = (rank.memory(1), rank.memory(2));
    rank.wait(page.word(3), 1);
    rank.copy(a, b);
    assert!(matches!(rank.device.synchronize(rank.stream), Err(Error::Driver { code: 702, .. })));
    let reports = world.end();
    assert_eq!(faults(&reports), ["Stuck"]);
    assert!(reports[0].contains("has reached 1"), "{}", reports[0]);
}

#[test]
fn drop_of_a_world_with_unread_errors_panics() {
    let dropped = std::panic::catch_unwind(|| {
        let world = World::seeded(0);
        let rank = Rank::new(&world);
        let (a, b) = (rank.device.allocate(BYTES).unwrap(), rank.memory(2));
        rank.copy(a, b);
    });
    assert!(dropped.is_err());
}

#[test]
fn leaks_are_listed() {
    let page = Page::new();
    let world = World::seeded(0);
    let (a, b) = (Rank::with(&world, &page), Rank::new(&world));
    let memory = a.memory(1);
    b.import(&a, memory);
    a.device.create_event().unwrap();
    let leaks = query(c"leaks");
    for part in [
        "256 bytes (Device)",
        "4096 bytes (Registered)",
        "rank 1: 256 bytes (Imported)",
        "a stream",
        "an event",
    ] {
        assert!(leaks.iter().any(|leak| leak.contains(part)), "{part}: {leaks:?}");
    }
    assert_clean(&world, "clean");
}

#[test]
fn calls_that_may_block_on_a_waiting_stream_are_reported() {
    let page = Page::new();
    let world = World::seeded(0);
    let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
    a.wait(page.word(0), 1);
    a.wait(page.word(1), 1);
    b.wait(page.word(2), 1);
    let memory = a.device.allocate(BYTES).unwrap();
    let stalls = world.stalls();
    assert_eq!(stalls.len(), 1);
    assert!(stalls[0].contains("cuMemAlloc") && stalls[0].contains("stream 0, operation 1:"), "{stalls:?}");
    // SAFETY: words of the page.
    unsafe { b.device.store(page.word(0), 1) };
    let more = a.device.allocate(BYTES).unwrap();
    assert!(world.stalls()[1].contains("stream 0, operation 2:"), "the next");
    // SAFETY: as above.
    unsafe { b.device.store(page.word(2), 1) };
    // Enqueued, although not yet executed.
    b.write(page.word(1), 1);
    for memory in [memory, more] {
        // SAFETY: unused.
        unsafe { a.device.free(memory) };
    }
    assert_eq!(world.stalls().len(), 2);
    assert_clean(&world, "clean");
}

#[test]
fn stream_writes_words_only_in_own_aligned_memory() {
    let world = World::seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let memory = a.memory(0);
    a.write(memory, 1);
    let peer = b.import(&a, memory);
    // SAFETY: rejected.
    assert!(unsafe { b.device.write_word(b.stream, peer, 1) }.is_err());
    assert_eq!(faults(&world.reports()), ["Misuse"]);
    // SAFETY: rejected, not aligned.
    assert!(unsafe { a.device.write_word(a.stream, memory + 4, 1) }.is_err());
    assert_eq!(faults(&world.end()), ["Misuse", "Unknown"]);
}
