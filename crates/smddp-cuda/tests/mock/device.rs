//! What the mock's devices are like where programs ask.

use smddp_cuda::mock::{Memory, Script, World};
use smddp_cuda::{Device, Error, Export, Import, Kind, Stream, Wait};

use crate::rank::{BYTES, Page, Rank, assert_clean, faults, seeded};

#[test]
fn memory_is_exported_by_its_kind_and_imported_by_others_only() {
    let world = seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let legacy = a.device.allocate(BYTES).unwrap();
    let region = a.device.region(legacy + 10).unwrap();
    assert_eq!((region.base, region.bytes, region.kind), (legacy, BYTES, Kind::Legacy));
    let Export::Legacy(handle) = a.device.export(&region).unwrap() else { panic!("a handle") };
    let own = a.device.import(Import::Legacy(&handle), BYTES);
    assert!(matches!(own, Err(Error::Driver { code: 201, .. })), "{own:?}");
    let imported = b.device.import(Import::Legacy(&handle), BYTES).unwrap();
    assert_ne!(imported.base, legacy);
    assert_eq!(b.device.region(imported.base).unwrap().kind, Kind::Private);

    let private = a.device.allocate_as(Memory::Private, BYTES).unwrap();
    assert!(a.device.export(&a.device.region(private).unwrap()).is_err());
    let pinned = a.device.allocate_host(BYTES).unwrap() as u64;
    assert_eq!(a.device.region(pinned).unwrap().kind, Kind::Host);
    assert!(a.device.export(&a.device.region(pinned).unwrap()).is_err());
    assert!(a.device.region(&raw const world as u64).is_err());
    assert!(b.device.region(legacy).is_err());
    assert!(b.device.import(Import::Legacy(&[7; 64]), BYTES).is_err());
    assert_clean(&world);
}

#[test]
fn mapped_memory_is_chunks_in_a_row_each_with_its_own_descriptor() {
    let world = seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let memory = a.device.allocate_as(Memory::Mapped { chunk: 100 }, BYTES).unwrap();
    let data: Vec<u8> = (0..BYTES).map(|k| k as u8).collect();
    world.upload(memory, &data);
    let copy = a.memory(&world, 0);
    a.copy(memory, copy);
    a.synchronize();
    assert_eq!(world.download(copy, BYTES), data);
    world.settle();

    let mut at = memory;
    let mut generations = Vec::new();
    while at < memory + BYTES as u64 {
        let region = a.device.region(at).unwrap();
        assert_eq!((region.kind, region.base), (Kind::Mapped, at));
        let Export::Descriptor(descriptor) = a.device.export(&region).unwrap() else {
            panic!("a descriptor")
        };
        let imported = b.device.import(Import::Descriptor(&descriptor), region.bytes).unwrap();
        let out = b.memory(&world, 0);
        let copy = smddp_cuda::Copy { to: out, from: imported.base, bytes: region.bytes };
        // SAFETY: memory of the mock.
        unsafe { b.device.copy(b.stream, &[copy]) }.unwrap();
        b.synchronize();
        let start = (at - memory) as usize;
        assert_eq!(world.download(out, region.bytes), data[start..start + region.bytes]);
        b.device.close(imported);
        generations.push(region.generation);
        at += region.bytes as u64;
    }
    generations.dedup();
    assert_eq!(generations.len(), 3);
    world.settle();
    // SAFETY: nobody uses it any more.
    unsafe { a.device.free(memory) };
    assert!(a.device.region(memory + 200).is_err());
    assert_clean(&world);
}

#[test]
fn the_script_says_what_the_devices_cannot() {
    let script = Script {
        devices: 2,
        unreachable: vec![(1, 0)],
        no_words: Some("the driver is too old".into()),
        memory: Some(1000),
        pinned: Some(1000),
        ..Script::default()
    };
    let world = World::new(script);
    let (a, b) = (Rank::new(&world), world.process());
    let far = b.device(1);
    assert!(a.device.reaches(&far.uuid()) && !far.reaches(&a.device.uuid()));
    assert!(!far.reaches(&[9; 16]));
    let first = a.device.allocate(600).unwrap();
    assert!(matches!(a.device.allocate(600), Err(Error::Driver { code: 2, .. })));
    let Export::Legacy(handle) = a.device.export(&a.device.region(first).unwrap()).unwrap() else {
        panic!("a handle")
    };
    assert!(matches!(far.import(Import::Legacy(&handle), 600), Err(Error::Driver { code: 217, .. })));
    assert!(a.process.device(1).region(first).is_err(), "memory of another device");
    // SAFETY: nobody uses it.
    unsafe { a.device.free(first) };
    a.device.allocate(600).unwrap();
    a.device.allocate_host(600).unwrap();
    assert!(far.allocate_host(600).is_err());
    assert_eq!(a.device.no_words().as_deref(), Some("the driver is too old"));
    // SAFETY: refused.
    unsafe {
        assert!(a.device.write_word(a.stream, first, 1).is_err());
        assert!(a.device.wait_words(a.stream, &[Wait { word: first, value: 1 }]).is_err());
    }
    assert_clean(&world);
}

#[test]
fn a_captured_stream_takes_no_work() {
    let world = seeded(0);
    let rank = Rank::new(&world);
    let event = rank.device.create_event().unwrap();
    assert!(!rank.device.capturing(rank.stream).unwrap());
    rank.device.set_capturing(rank.stream, true);
    assert!(rank.device.capturing(rank.stream).unwrap());
    let refused = rank.device.record(event, rank.stream);
    assert!(matches!(refused, Err(Error::Driver { code: 900, .. })), "{refused:?}");
    rank.device.set_capturing(rank.stream, false);
    rank.device.record(event, rank.stream).unwrap();
    assert_clean(&world);
}

#[test]
fn every_process_has_a_default_stream() {
    let world = seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    for rank in [&a, &b] {
        let (from, to) = (rank.memory(&world, 4), rank.memory(&world, 0));
        rank.copy_on(Stream(0), from, to);
        rank.device.synchronize(Stream(0)).unwrap();
        assert_eq!(world.download(to, BYTES), [4; BYTES]);
    }
    assert_clean(&world);
}

#[test]
fn a_page_mapped_at_two_addresses_has_one_set_of_words() {
    // SAFETY: a file of its own, mapped twice; unmapped with the process.
    let [one, two] = unsafe {
        let file = libc::memfd_create(c"words".as_ptr(), libc::MFD_CLOEXEC);
        assert!(file >= 0 && libc::ftruncate(file, 4096) == 0);
        [(); 2].map(|()| {
            let protection = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(std::ptr::null_mut(), 4096, protection, libc::MAP_SHARED, file, 0).cast::<u8>()
        })
    };
    for seed in 0..20 {
        let world = seeded(seed);
        let (a, b) = (Rank::new(&world), Rank::new(&world));
        // SAFETY: mapped above; the word is set back before the streams know of it.
        unsafe {
            one.cast::<u64>().write(0);
            a.device.register(one, 4096).unwrap();
            b.device.register(two, 4096).unwrap();
        }
        let (from, to, out) = (a.memory(&world, 1), a.memory(&world, 2), b.memory(&world, 3));
        let peer = b.import(&a, to);
        b.wait(two as u64 + 8 * 3, 1 + seed);
        b.copy(peer, out);
        a.copy(from, to);
        a.write(one as u64 + 8 * 3, 1 + seed);
        assert_clean(&world);
        assert_eq!(world.download(out, BYTES), [1; BYTES]);
    }
}

#[test]
fn a_word_is_written_in_memory_of_ones_own() {
    let world = seeded(0);
    let (a, b) = (Rank::new(&world), Rank::new(&world));
    let memory = a.memory(&world, 0);
    a.write(memory, 1);
    let peer = b.import(&a, memory);
    // SAFETY: refused.
    assert!(unsafe { b.device.write_word(b.stream, peer, 1) }.is_err());
    // SAFETY: refused, not aligned.
    assert!(unsafe { a.device.write_word(a.stream, memory + 4, 1) }.is_err());
    assert_eq!(faults(&world.end()), [smddp_cuda::mock::Fault::Misuse]);
    let page = Page::new();
    assert_eq!(page.word(1) - page.word(0), 8);
}
