//! Races, and the operations that prevent them.

use std::sync::atomic::{AtomicU64, Ordering};

use smddp_cuda::{Address, Copy, Element, Fold, Reduction};

use crate::rank::{BYTES, Page, Rank};
use crate::world::{World, assert_clean, download, faults, upload};

fn unreported_atomic(word: Address) -> &'static AtomicU64 {
    // SAFETY: a word of a page that outlives the use; all accesses are atomic.
    unsafe { AtomicU64::from_ptr(word as *mut u64) }
}

/// Two streams of one rank: the second reads memory that the first writes. `between` may order them.
fn two_streams(seed: u64, between: impl Fn(&Rank, smddp_cuda::Stream)) -> World {
    let world = World::seeded(seed);
    let rank = Rank::new(&world);
    let other = rank.device.create_stream().unwrap();
    let (a, b, c) = (rank.memory(1), rank.memory(2), rank.memory(3));
    rank.copy(a, b);
    between(&rank, other);
    rank.copy_on(other, b, c);
    world.settle();
    if world.reports().is_empty() {
        assert_eq!(download(&rank.device, c, BYTES), [1; BYTES]);
    }
    world
}

#[test]
fn unordered_streams_race_for_all_delays() {
    for seed in 0..50 {
        let world = two_streams(seed, |_, _| {});
        let races = world.reports();
        assert_eq!(faults(&races), ["Race"], "seed {seed}");
        let text = &races[0];
        assert!(text.contains("256 bytes at offset 0 of rank 0's allocation"), "{text}");
        assert!(text.contains("rank 0, stream 0") && text.contains("rank 0, stream 1"), "{text}");
    }
}

#[test]
fn event_orders_two_streams() {
    for seed in 0..50 {
        let world = two_streams(seed, |rank, other| {
            let event = rank.device.create_event().unwrap();
            rank.device.record(event, rank.stream).unwrap();
            rank.device.wait_event(other, event).unwrap();
            rank.device.destroy_event(event);
        });
        assert_clean(&world, "clean");
    }
}

#[test]
fn event_does_not_order_work_after_its_record() {
    for seed in 0..20 {
        let world = World::seeded(seed);
        let rank = Rank::new(&world);
        let other = rank.device.create_stream().unwrap();
        let (a, b, c) = (rank.memory(1), rank.memory(2), rank.memory(3));
        let event = rank.device.create_event().unwrap();
        rank.device.record(event, rank.stream).unwrap();
        rank.copy(a, b);
        rank.device.wait_event(other, event).unwrap();
        rank.copy_on(other, b, c);
        assert_eq!(faults(&world.end()), ["Race"]);
    }
}

#[test]
fn host_orders_two_streams_only_after_a_wait_for_the_first() {
    let world = two_streams(1, |rank, _| rank.synchronize());
    assert_clean(&world, "clean");
    drop(world);
    let world = two_streams(1, |rank, _| {
        let event = rank.device.create_event().unwrap();
        rank.device.record(event, rank.stream).unwrap();
        while !rank.device.passed(event).unwrap() {}
    });
    assert_clean(&world, "clean");
    drop(world);
    let world = two_streams(1, |rank, _| {
        let early = rank.device.create_event().unwrap();
        // Never recorded, so complete: it orders nothing.
        assert!(rank.device.passed(early).unwrap());
    });
    assert_eq!(faults(&world.end()), ["Race"]);
}

#[test]
fn host_races_with_streams_without_a_wait() {
    for (synchronize, writes, races) in [(true, true, 0), (false, true, 1), (false, false, 0)] {
        let world = World::seeded(3);
        let rank = Rank::new(&world);
        let (a, b) = (rank.memory(1), rank.memory(2));
        rank.copy(a, b);
        if synchronize {
            rank.synchronize();
        }
        rank.device.report_host_access(a, BYTES, writes);
        assert_eq!(world.end().len(), races, "{synchronize} {writes}");
    }
}

#[test]
fn host_access_after_the_enqueue_races_with_the_operation() {
    let (world, page) = (World::seeded(3), Page::new());
    let rank = Rank::with(&world, &page);
    let (a, b) = (rank.memory(1), rank.memory(2));
    rank.wait(page.word(0), 1);
    rank.copy(a, b);
    upload(&rank.device, a, &[9; BYTES]);
    // Happens to run before the copy.
    unreported_atomic(page.word(0)).store(1, Ordering::Release);
    rank.synchronize();
    assert_eq!(download(&rank.device, b, BYTES), [9; BYTES]);
    assert_eq!(faults(&world.end()), ["Race"]);
}

#[test]
fn word_orders_two_ranks() {
    for seed in 0..50 {
        for wait in [true, false] {
            let (world, page) = (World::seeded(seed), Page::new());
            let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
            let (from, to, out) = (a.memory(1), a.memory(2), b.memory(3));
            let peer = b.import(&a, to);
            if wait {
                b.wait(page.word(0), 1);
            }
            b.copy(peer, out);
            a.copy(from, to);
            a.write(page.word(0), 1);
            let found = faults(&world.end());
            if wait {
                assert_eq!(found, [""; 0]);
                assert_eq!(download(&b.device, out, BYTES), [1; BYTES]);
            } else {
                // The upload belongs to another process too, and is not ordered either.
                assert!(!found.is_empty() && found.iter().all(|fault| *fault == "Race"), "{found:?}");
            }
        }
    }
}

#[test]
fn order_goes_through_a_third_stream() {
    for seed in 0..30 {
        for (skip, races) in [(None, 0), (Some(0), 1), (Some(1), 1)] {
            let (world, page) = (World::seeded(seed), Page::new());
            let ranks: Vec<Rank> = (0..3).map(|_| Rank::with(&world, &page)).collect();
            let (from, to, out) = (ranks[0].memory(1), ranks[0].memory(2), ranks[2].memory(3));
            let peer = ranks[2].import(&ranks[0], to);
            world.settle();
            ranks[0].copy(from, to);
            ranks[0].write(page.word(0), 1);
            if skip != Some(0) {
                ranks[1].wait(page.word(0), 1);
            }
            ranks[1].write(page.word(1), 1);
            if skip != Some(1) {
                ranks[2].wait(page.word(1), 1);
            }
            ranks[2].copy(peer, out);
            assert_eq!(world.end().len(), races, "seed {seed}, without {skip:?}");
        }
    }
}

#[test]
fn wait_is_ordered_after_the_first_satisfying_write_only() {
    for (value, races) in [(1, 1), (2, 0)] {
        let (world, page) = (World::seeded(0), Page::new());
        let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
        let (from, to, out) = (a.memory(1), a.memory(2), b.memory(3));
        let peer = b.import(&a, to);
        world.settle();
        a.write(page.word(0), 1);
        a.copy(from, to);
        a.write(page.word(0), 2);
        // The word is 2 at every poll of the wait.
        a.synchronize();
        b.wait(page.word(0), value);
        b.copy(peer, out);
        assert_eq!(world.end().len(), races, "a wait for {value}");
    }
}

#[test]
fn host_is_ordered_after_the_requested_value_only() {
    for (value, races) in [(1, 1), (2, 0)] {
        let (world, page) = (World::seeded(0), Page::new());
        let rank = Rank::with(&world, &page);
        let (from, to) = (rank.memory(1), rank.memory(2));
        rank.write(page.word(0), 1);
        rank.copy(from, to);
        rank.write(page.word(0), 2);
        while unreported_atomic(page.word(0)).load(Ordering::Acquire) != 2 {}
        // SAFETY: a word of the page.
        assert!(unsafe { rank.device.has_reached(page.word(0), value) });
        rank.device.report_host_access(to, BYTES, false);
        assert_eq!(world.end().len(), races, "{value}");
    }
}

#[test]
fn host_store_orders_a_waiting_stream() {
    for stored in [true, false] {
        let (world, page) = (World::seeded(0), Page::new());
        let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
        let (to, out) = (a.memory(1), b.memory(2));
        let peer = b.import(&a, to);
        b.wait(page.word(0), 1);
        b.copy(peer, out);
        if stored {
            // SAFETY: a word of the page.
            unsafe { a.device.store(page.word(0), 1) };
            assert_eq!(faults(&world.end()), [""; 0]);
        } else {
            // Not reported to the driver: it satisfies the wait, and orders nothing.
            unreported_atomic(page.word(0)).store(1, Ordering::Release);
            b.synchronize();
            assert_eq!(faults(&world.end()), ["Race"]);
        }
    }
}

#[test]
fn waits_compare_the_signed_difference_and_abort_value_satisfies_all() {
    let (world, page) = (World::seeded(0), Page::new());
    let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
    // SAFETY: a word of the page.
    unsafe { a.device.store(page.word(0), u64::MAX) };
    b.wait(page.word(0), 2);
    let event = b.device.create_event().unwrap();
    b.device.record(event, b.stream).unwrap();
    a.write(page.word(0), 1);
    a.synchronize();
    assert!(!b.device.passed(event).unwrap());
    a.write(page.word(0), 2);
    b.synchronize();
    for value in [3, 1 << 40, (1 << 62) - 1] {
        b.wait(page.word(0), value);
    }
    // SAFETY: as above.
    unsafe { a.device.store(page.word(0), 1 << 62) };
    b.synchronize();
    assert_clean(&world, "clean");
}

#[test]
fn streams_released_by_the_abort_value_report_no_races() {
    let (world, page) = (World::seeded(0), Page::new());
    let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
    let (from, to, out) = (a.memory(1), a.memory(2), b.memory(3));
    let peer = b.import(&a, to);
    world.settle();
    b.wait(page.word(0), 1);
    b.copy(peer, out);
    // SAFETY: a word of the page.
    unsafe { b.device.store(page.word(0), 1 << 62) };
    a.copy(from, to);
    b.synchronize();
    assert_eq!(faults(&world.reports()), [""; 0]);
    // A host synchronization ends the exemption of the stream.
    b.copy(peer, out);
    assert_eq!(faults(&world.end()), ["Race"]);
}

#[test]
fn copy_over_an_awaited_word_is_a_race() {
    let (world, page) = (World::seeded(0), Page::new());
    let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
    let from = a.memory(1);
    b.wait(page.word(0), 1);
    // SAFETY: the world checks the lifetimes.
    unsafe { a.device.copy(a.stream, &[Copy { to: page.word(0), from, bytes: 8 }]) }.unwrap();
    b.synchronize();
    assert_eq!(faults(&world.end()), ["Race"]);
}

#[test]
fn copies_of_one_call_are_unordered() {
    let world = World::seeded(0);
    let rank = Rank::new(&world);
    let (a, b, c) = (rank.memory(1), rank.memory(2), rank.memory(3));
    let copy = |from, to| Copy { to, from, bytes: BYTES };
    // SAFETY: the world checks the lifetimes.
    unsafe {
        rank.device.copy(rank.stream, &[copy(a, b), copy(a, c)]).unwrap();
        assert_eq!(faults(&world.reports()), [""; 0]);
        rank.device.copy(rank.stream, &[copy(a, b), copy(b, c)]).unwrap();
        rank.device.copy(rank.stream, &[Copy { to: a + 8, from: a, bytes: 16 }]).unwrap();
    }
    assert_eq!(faults(&world.end()), ["Overlap", "Overlap"]);
}

#[test]
fn reduction_may_write_a_whole_source_but_not_a_part() {
    let world = World::seeded(0);
    let rank = Rank::new(&world);
    let (a, b) = (rank.memory(1), rank.memory(2));
    let reduction = Reduction {
        element: Element::U8,
        fold: Fold::Sum,
        sources: vec![a, b],
        to: b,
        count: BYTES,
        divide: None,
        times: None,
    };
    // SAFETY: the world checks the lifetimes.
    unsafe {
        rank.device.reduce(rank.stream, &reduction).unwrap();
        rank.synchronize();
        assert_eq!(download(&rank.device, b, BYTES), [3; BYTES]);
        let shifted = Reduction { to: b + 1, count: 8, ..reduction };
        rank.device.reduce(rank.stream, &shifted).unwrap();
    }
    assert_eq!(faults(&world.end()), ["Overlap"]);
}

#[test]
fn omitted_wait_is_a_race_and_redundant_wait_is_reported() {
    let run = |left_out: &str| {
        let (world, page) = (World::new(&format!("FAKE_CUDA_DROP={left_out}")), Page::new());
        let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
        let (from, to, out) = (a.memory(1), a.memory(2), b.memory(3));
        let peer = b.import(&a, to);
        world.settle();
        a.copy(from, to);
        a.write(page.word(0), 1);
        b.wait(page.word(0), 1);
        b.wait(page.word(0), 1);
        b.copy(peer, out);
        let found = faults(&world.end());
        (world.waits(), found)
    };
    let (waits, found) = run("none");
    assert_eq!(found, [""; 0]);
    assert_eq!(waits.iter().map(|wait| wait.needed).collect::<Vec<_>>(), [true, false]);
    // Each wait alone is sufficient.
    for wait in &waits {
        assert_eq!(run(&wait.id).1, [""; 0]);
    }
}

#[test]
fn wait_is_early_without_an_enqueued_satisfying_write() {
    for seed in 0..20 {
        let (world, page) = (World::seeded(seed), Page::new());
        let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
        b.wait(page.word(0), 1);
        // Enqueued before the dependent wait, but completed later.
        b.write(page.word(1), 7);
        a.wait(page.word(1), 7);
        a.wait(page.word(2), 0);
        // SAFETY: a word of the page.
        unsafe { a.device.store(page.word(0), 1) };
        let event = a.device.create_event().unwrap();
        a.device.record(event, a.stream).unwrap();
        a.device.wait_event(a.device.create_stream().unwrap(), event).unwrap();
        let found: Vec<_> = world.waits().into_iter().map(|wait| (wait.id, wait.early)).collect();
        assert_eq!(found.len(), 4);
        assert!(found.iter().all(|(id, early)| *early == (id == "1.0.0")), "{found:?}");
        assert_clean(&world, "clean");
    }
}

#[test]
fn ten_thousand_operations_take_less_than_100_seconds() {
    let started = std::time::Instant::now();
    let (world, page) = (World::seeded(7), Page::new());
    let (a, b) = (Rank::with(&world, &page), Rank::with(&world, &page));
    let (from, to, out) = (a.memory(1), a.memory(2), b.memory(3));
    let peer = b.import(&a, to);
    for iteration in 1..=1250 {
        a.wait(page.word(1), iteration - 1);
        a.copy(from, to);
        a.copy(to, from);
        a.write(page.word(0), iteration);
        b.wait(page.word(0), iteration);
        b.copy(peer, out);
        b.copy(out, peer);
        b.write(page.word(1), iteration);
    }
    assert_clean(&world, "clean");
    // Takes two seconds on an idle machine. An algorithm with quadratic time would take many minutes.
    assert!(started.elapsed().as_secs() < 100, "{:?}", started.elapsed());
}

#[test]
fn every_process_has_a_default_stream() {
    let world = World::seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    for rank in [&a, &b] {
        let (from, to) = (rank.memory(4), rank.memory(0));
        rank.copy_on(smddp_cuda::Stream(0), from, to);
        rank.device.synchronize(smddp_cuda::Stream(0)).unwrap();
        assert_eq!(download(&rank.device, to, BYTES), [4; BYTES]);
    }
    assert_clean(&world, "clean");
}

#[test]
fn page_mapped_at_two_addresses_has_one_set_of_words() {
    // SAFETY: a new file, mapped twice; unmapped at process exit.
    let [one, two] = unsafe {
        let file = libc::memfd_create(c"words".as_ptr(), libc::MFD_CLOEXEC);
        assert!(file >= 0 && libc::ftruncate(file, 4096) == 0);
        [(); 2].map(|()| {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), 4096, protection, libc::MAP_SHARED, file, 0).cast::<u8>()
        })
    };
    for seed in 0..20 {
        let world = World::seeded(seed);
        let (a, b) = (Rank::new(&world), Rank::new(&world));
        // SAFETY: mapped above; the word is reset before the streams use it.
        unsafe {
            one.cast::<u64>().write(0);
            a.device.register(one, 4096).unwrap();
            b.device.register(two, 4096).unwrap();
        }
        let (from, to, out) = (a.memory(1), a.memory(2), b.memory(3));
        let peer = b.import(&a, to);
        b.wait(two as u64 + 8 * 3, 1 + seed);
        b.copy(peer, out);
        a.copy(from, to);
        a.write(one as u64 + 8 * 3, 1 + seed);
        assert_clean(&world, "clean");
        assert_eq!(download(&b.device, out, BYTES), [1; BYTES]);
    }
}
