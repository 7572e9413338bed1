//! Memory that goes, and streams that stay.

use std::time::Duration;

use smddp_cuda::mock::{Fault, Script, World};
use smddp_cuda::{Device, Error, Export, Import};

use crate::rank::{BYTES, Page, Rank, assert_clean, faults, seeded};

#[test]
fn freeing_what_a_stream_may_still_use_is_found_whenever_the_stream_came_to_it() {
    for seed in 0..50 {
        for synchronize in [true, false] {
            let world = seeded(seed);
            let rank = Rank::new(&world);
            let (a, b) = (rank.memory(&world, 1), rank.memory(&world, 2));
            rank.copy(a, b);
            if synchronize {
                rank.synchronize();
            }
            // SAFETY: whether it is in use is what the mock is asked.
            unsafe { rank.device.free(a) };
            let found = faults(&world.end());
            assert_eq!(found, if synchronize { vec![] } else { vec![Fault::Freed] }, "seed {seed}");
        }
    }
}

#[test]
fn an_owner_may_not_free_while_a_reader_may_still_read() {
    for seed in 0..50 {
        for wait in [true, false] {
            let (world, page) = (seeded(seed), Page::new());
            let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
            let (to, out) = (a.memory(&world, 1), b.memory(&world, 2));
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
            assert_eq!(found, if wait { vec![] } else { vec![Fault::Freed] }, "seed {seed}");
        }
    }
}

#[test]
fn an_open_import_of_freed_memory_is_no_mistake_until_it_is_used() {
    let world = seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let (to, out) = (a.memory(&world, 1), b.memory(&world, 2));
    let peer = b.import(&a, to);
    // SAFETY: nobody used it.
    unsafe { a.device.free(to) };
    assert_eq!(faults(&world.reports()), []);
    b.copy(peer, out);
    assert_eq!(faults(&world.end()), [Fault::Freed]);
}

#[test]
fn an_allocation_at_the_address_of_a_freed_one_is_another() {
    let world = World::new(Script { reuse: true, ..Script::default() });
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let (to, out) = (a.memory(&world, 1), b.memory(&world, 2));
    let peer = b.import(&a, to);
    let region = a.device.region(to).unwrap();
    // SAFETY: nobody used it.
    unsafe { a.device.free(to) };
    let again = a.memory(&world, 3);
    assert_eq!(again, to);
    assert_ne!(a.device.region(again).unwrap().generation, region.generation);
    assert_eq!(faults(&world.reports()), []);
    // The old import does not show the new allocation.
    b.copy(peer, out);
    assert_eq!(faults(&world.end()), [Fault::Freed]);
}

#[test]
fn closing_what_a_stream_may_still_read_is_found_whenever_the_stream_came_to_it() {
    for seed in 0..50 {
        for synchronize in [true, false] {
            let world = seeded(seed);
            let (a, b) = (Rank::new(&world), Rank::new(&world));
            let (to, out) = (a.memory(&world, 1), b.memory(&world, 2));
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
            assert_eq!(found, if synchronize { vec![] } else { vec![Fault::Closed] }, "seed {seed}");
        }
    }
}

#[test]
fn a_handle_opened_twice_is_closed_twice() {
    let world = seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let (to, out) = (a.memory(&world, 1), b.memory(&world, 2));
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
    assert_eq!(faults(&world.reports()), []);
    b.device.close(second);
    assert_eq!(faults(&world.reports()), [Fault::Misuse]);
    let copy = smddp_cuda::Copy { to: out, from: first.base, bytes: 1 };
    // SAFETY: the mock refuses what is gone.
    let late = unsafe { b.device.copy(b.stream, &[copy]) };
    assert!(matches!(late, Err(Error::Driver { code: 1, .. })));
    assert_eq!(faults(&world.end()), [Fault::Misuse, Fault::Closed]);
}

#[test]
fn another_ranks_address_is_no_address_here() {
    let world = seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let (theirs, mine) = (a.memory(&world, 1), b.memory(&world, 2));
    let copy = smddp_cuda::Copy { to: mine, from: theirs, bytes: BYTES };
    // SAFETY: the mock refuses it.
    assert!(unsafe { b.device.copy(b.stream, &[copy]) }.is_err());
    // Nor is what lies behind the end of one's own.
    let copy = smddp_cuda::Copy { to: mine, from: mine + 8, bytes: BYTES };
    // SAFETY: as above.
    assert!(unsafe { b.device.copy(b.stream, &[copy]) }.is_err());
    assert_eq!(faults(&world.end()), [Fault::Unknown, Fault::Unknown]);
}

#[test]
fn words_are_unregistered_after_their_last_use() {
    for seed in 0..20 {
        for synchronize in [true, false] {
            let (world, page) = (seeded(seed), Page::new());
            let rank = Rank::with(&world, &page);
            rank.write(page.word(0), 1);
            if synchronize {
                rank.synchronize();
            }
            // SAFETY: whether it is in use is what the mock is asked.
            unsafe { rank.device.unregister(page.memory()) };
            let found = faults(&world.end());
            assert_eq!(found, if synchronize { vec![] } else { vec![Fault::Freed] }, "seed {seed}");
        }
    }
}

#[test]
fn memory_freed_twice_and_handles_of_others_are_reported() {
    let world = seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let memory = a.device.allocate(BYTES).unwrap();
    // SAFETY: the mock refuses what is wrong.
    unsafe {
        a.device.free(memory + 1);
        a.device.free(memory);
        a.device.free(memory);
    }
    assert!(b.device.synchronize(a.stream).is_err());
    let event = a.device.create_event().unwrap();
    a.device.destroy_event(event);
    assert!(a.device.record(event, a.stream).is_err());
    assert_eq!(faults(&world.end()), [Fault::Misuse; 4]);
}

#[test]
fn device_memory_that_nothing_wrote_is_not_read() {
    let world = seeded(0);
    let rank = Rank::new(&world);
    let (a, b) = (rank.device.allocate(BYTES).unwrap(), rank.memory(&world, 2));
    rank.copy(a, b);
    rank.copy(a, b);
    assert_eq!(faults(&world.end()), [Fault::Unwritten]);
}

#[test]
fn a_stream_that_stands_at_a_wait_is_reported_and_holds_up_nothing() {
    let page = Page::new();
    let world = World::new(Script { patience: Duration::from_millis(100), ..Script::default() });
    let rank = Rank::with(&world, &page);
    let (a, b) = (rank.memory(&world, 1), rank.memory(&world, 2));
    rank.wait(page.word(3), 1);
    rank.copy(a, b);
    assert!(matches!(rank.device.synchronize(rank.stream), Err(Error::Driver { code: 702, .. })));
    let reports = world.end();
    assert_eq!(faults(&reports), [Fault::Stuck]);
    assert!(reports[0].to_string().contains("has reached 1"), "{}", reports[0]);
    assert!(rank.device.create_event().is_err(), "the world has ended");
}

#[test]
fn a_killed_process_does_no_more() {
    let page = Page::new();
    let world = seeded(0);
    let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
    let (from, to) = (a.memory(&world, 1), a.memory(&world, 2));
    a.wait(page.word(0), 1);
    a.copy(from, to);
    a.write(page.word(1), 1);
    b.wait(page.word(1), 1);
    a.process.kill();
    assert!(a.device.create_event().is_err());
    // SAFETY: words of the page.
    unsafe {
        b.device.store(page.word(0), 1);
        b.device.store(page.word(1), 1 << 62);
    }
    b.synchronize();
    assert_eq!(world.download(to, BYTES), [2; BYTES]);
    assert_clean(&world);
}

#[test]
fn a_world_dropped_with_mistakes_that_nobody_asked_about_panics() {
    let dropped = std::panic::catch_unwind(|| {
        let world = seeded(0);
        let rank = Rank::new(&world);
        let (a, b) = (rank.device.allocate(BYTES).unwrap(), rank.memory(&world, 2));
        rank.copy(a, b);
    });
    assert!(dropped.is_err());
}

#[test]
fn what_was_not_given_back_is_named() {
    let page = Page::new();
    let world = seeded(0);
    let (a, b) = (Rank::with(&world, &page), Rank::new(&world));
    let memory = a.memory(&world, 1);
    b.import(&a, memory);
    a.device.create_event().unwrap();
    let leaks = world.leaks();
    for part in
        ["256 bytes allocated", "4096 bytes registered", "rank 1: 256 bytes imported", "stream 0", "an event"]
    {
        assert!(leaks.iter().any(|leak| leak.contains(part)), "{part}: {leaks:?}");
    }
    assert_clean(&world);
}

#[test]
fn calls_that_may_wait_for_a_stream_that_nobody_lets_go_are_told() {
    let page = Page::new();
    let world = seeded(0);
    let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
    a.wait(page.word(0), 1);
    a.wait(page.word(1), 1);
    b.wait(page.word(2), 1);
    let memory = a.device.allocate(BYTES).unwrap();
    let stalls = world.stalls();
    assert_eq!(stalls.len(), 1);
    assert_eq!((stalls[0].call.what.as_str(), stalls[0].wait.number), ("cuMemAlloc", 1));
    // SAFETY: words of the page; and nobody uses the memory.
    unsafe {
        b.device.store(page.word(0), 1);
        a.device.free(memory);
        assert_eq!(world.stalls()[1].wait.number, 2, "the next");
        b.device.store(page.word(2), 1);
    }
    // On the way, though it has not come to pass.
    b.write(page.word(1), 1);
    a.device.allocate(BYTES).unwrap();
    assert_eq!(world.stalls().len(), 2);
    assert_clean(&world);
}
