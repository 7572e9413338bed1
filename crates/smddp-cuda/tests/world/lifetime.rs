//! Memory that goes, and streams that stay.

use smddp_cuda::{Error, Export, Import};

use crate::rank::{BYTES, Page, Rank};
use crate::world::{World, assert_clean, faults, tell};

#[test]
fn freeing_what_a_stream_may_still_use_is_found_whenever_the_stream_came_to_it() {
    for seed in 0..50 {
        for synchronize in [true, false] {
            let world = World::seeded(seed);
            let rank = Rank::new(&world);
            let (a, b) = (rank.memory(1), rank.memory(2));
            rank.copy(a, b);
            if synchronize {
                rank.synchronize();
            }
            // SAFETY: whether it is in use is what the world is asked.
            unsafe { rank.device.free(a) };
            let found = faults(&world.end());
            assert_eq!(found, if synchronize { vec![] } else { vec!["Freed"] }, "seed {seed}");
        }
    }
}

#[test]
fn an_owner_may_not_free_while_a_reader_may_still_read() {
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
fn an_open_import_of_freed_memory_is_no_mistake_until_it_is_used() {
    let world = World::seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let (to, out) = (a.memory(1), b.memory(2));
    let peer = b.import(&a, to);
    // SAFETY: nobody used it.
    unsafe { a.device.free(to) };
    assert_eq!(faults(&world.reports()), [""; 0]);
    b.copy(peer, out);
    assert_eq!(faults(&world.end()), ["Freed"]);
}

#[test]
fn closing_what_a_stream_may_still_read_is_found_whenever_the_stream_came_to_it() {
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
fn a_handle_opened_twice_is_closed_twice() {
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
    // SAFETY: the driver refuses what is gone.
    let late = unsafe { b.device.copy(b.stream, &[copy]) };
    assert!(matches!(late, Err(Error::Driver { code: 1, .. })));
    assert_eq!(faults(&world.end()), ["Misuse", "Unknown"]);
}

#[test]
fn another_ranks_address_is_no_address_here() {
    let world = World::seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let (theirs, mine) = (a.memory(1), b.memory(2));
    let copy = smddp_cuda::Copy { to: mine, from: theirs, bytes: BYTES };
    // SAFETY: the driver refuses it.
    assert!(unsafe { b.device.copy(b.stream, &[copy]) }.is_err());
    // Nor is what lies behind the end of one's own.
    let copy = smddp_cuda::Copy { to: mine, from: mine + 8, bytes: BYTES };
    // SAFETY: as above.
    assert!(unsafe { b.device.copy(b.stream, &[copy]) }.is_err());
    assert_eq!(faults(&world.end()), ["Unknown", "Unknown"]);
}

#[test]
fn words_are_unregistered_after_their_last_use() {
    for seed in 0..20 {
        for synchronize in [true, false] {
            let (world, page) = (World::seeded(seed), Page::new());
            let rank = Rank::with(&world, &page);
            rank.write(page.word(0), 1);
            if synchronize {
                rank.synchronize();
            }
            // SAFETY: whether it is in use is what the world is asked.
            unsafe { rank.device.unregister(page.memory()) };
            let found = faults(&world.end());
            assert_eq!(found, if synchronize { vec![] } else { vec!["Freed"] }, "seed {seed}");
        }
    }
}

#[test]
fn memory_freed_twice_and_handles_of_others_are_reported() {
    let world = World::seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let memory = a.device.allocate(BYTES).unwrap();
    // SAFETY: the driver refuses what is wrong.
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
fn device_memory_that_nothing_wrote_is_not_read() {
    let world = World::seeded(0);
    let rank = Rank::new(&world);
    let (a, b) = (rank.device.allocate(BYTES).unwrap(), rank.memory(2));
    rank.copy(a, b);
    rank.copy(a, b);
    assert_eq!(faults(&world.end()), ["Unwritten"]);
}

#[test]
fn a_stream_that_stands_at_a_wait_is_reported_and_holds_up_nothing() {
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
fn a_world_dropped_with_mistakes_that_nobody_asked_about_panics() {
    let dropped = std::panic::catch_unwind(|| {
        let world = World::seeded(0);
        let rank = Rank::new(&world);
        let (a, b) = (rank.device.allocate(BYTES).unwrap(), rank.memory(2));
        rank.copy(a, b);
    });
    assert!(dropped.is_err());
}

#[test]
fn what_was_not_given_back_is_named() {
    let page = Page::new();
    let world = World::seeded(0);
    let (a, b) = (Rank::with(&world, &page), Rank::new(&world));
    let memory = a.memory(1);
    b.import(&a, memory);
    a.device.create_event().unwrap();
    let leaks = tell(c"leaks");
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
fn calls_that_may_wait_for_a_stream_that_nobody_lets_go_are_told() {
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
    // On the way, though it has not come to pass.
    b.write(page.word(1), 1);
    for memory in [memory, more] {
        // SAFETY: nobody uses it.
        unsafe { a.device.free(memory) };
    }
    assert_eq!(world.stalls().len(), 2);
    assert_clean(&world, "clean");
}

#[test]
fn a_word_is_written_in_memory_of_ones_own() {
    let world = World::seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let memory = a.memory(0);
    a.write(memory, 1);
    let peer = b.import(&a, memory);
    // SAFETY: refused.
    assert!(unsafe { b.device.write_word(b.stream, peer, 1) }.is_err());
    assert_eq!(faults(&world.reports()), ["Misuse"]);
    // SAFETY: refused, not aligned.
    assert!(unsafe { a.device.write_word(a.stream, memory + 4, 1) }.is_err());
    assert_eq!(faults(&world.end()), ["Misuse", "Unknown"]);
}
