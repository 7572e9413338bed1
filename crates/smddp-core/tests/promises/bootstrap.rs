//! Groups made over a store, by ranks as threads: the cards' way to everybody.

use std::collections::HashMap;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use smddp_core::{Communicator, Deletion, Error, Result, Store};

const PATIENCE: Duration = Duration::from_secs(60);

/// A store of this process, which counts what goes through it.
#[derive(Default)]
struct Values {
    values: Arc<Mutex<HashMap<String, Vec<u8>>>>,
    bytes: Mutex<usize>,
}

impl Values {
    fn count(&self, bytes: usize) {
        *self.bytes.lock().unwrap() += bytes;
    }
}

impl Store for Values {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.count(key.len() + value.len());
        self.values.lock().unwrap().insert(key.to_owned(), value.to_vec());
        Ok(())
    }

    fn has(&self, keys: &[String]) -> Result<bool> {
        self.count(keys.iter().map(String::len).sum());
        let values = self.values.lock().unwrap();
        Ok(keys.iter().all(|key| values.contains_key(key)))
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let value = self.values.lock().unwrap()[key].clone();
        self.count(key.len() + value.len());
        Ok(value)
    }

    fn delete(&self, key: &str) -> Result<()> {
        self.values.lock().unwrap().remove(key);
        Ok(())
    }

    fn deletion(&self, key: &str, value: &[u8]) -> Option<Deletion> {
        let (values, key, value) = (self.values.clone(), key.to_owned(), value.to_owned());
        Some(Box::new(move || {
            let mut values = values.lock().unwrap();
            if values.get(&key) == Some(&value) {
                values.remove(&key);
            }
            Ok(())
        }))
    }
}

/// What comes of it at each rank that takes part.
fn ranks<T: Send>(
    size: usize,
    takes_part: impl Fn(usize) -> bool,
    rank: impl Fn(usize) -> T + Sync,
) -> Vec<(usize, T)> {
    thread::scope(|scope| {
        let (rank, mut started) = (&rank, Vec::new());
        for one in (0..size).filter(|&one| takes_part(one)) {
            started.push((one, scope.spawn(move || rank(one))));
        }
        started.into_iter().map(|(one, thread)| (one, thread.join().unwrap())).collect()
    })
}

#[test]
fn all_ranks_meet_however_many_and_nothing_is_left() {
    for size in [1, 2, 3, 8, 9, 17, 80] {
        let store = Values::default();
        let over = Barrier::new(size);
        for (rank, comm) in ranks(
            size,
            |_| true,
            |rank| {
                let comm = Communicator::make(&store, ("making it", "all"), rank, size, PATIENCE, None);
                over.wait();
                comm
            },
        ) {
            let comm = comm.unwrap();
            assert_eq!((comm.rank(), comm.size()), (rank, size));
            comm.close();
        }
        assert!(store.values.lock().unwrap().is_empty(), "{size}: {:?}", store.values.lock().unwrap().keys());
    }
}

#[test]
fn what_a_rank_asks_of_the_store_does_not_grow_with_the_group() {
    let (size, store) = (120, Values::default());
    let comms = ranks(
        size,
        |_| true,
        |rank| Communicator::make(&store, ("making it", "few"), rank, size, PATIENCE, None).unwrap(),
    );
    let each = *store.bytes.lock().unwrap() / size;
    // Its address, its parent's, and looks for it, as many as a busy machine makes of them.
    assert!(each < 6_000, "{each} bytes a rank");
    comms.into_iter().for_each(|(_, comm)| comm.close());
}

#[test]
fn those_who_do_not_come_are_named_by_all_others_about_at_the_deadline() {
    // Far from what it takes those who come.
    let (size, timeout) = (40, Duration::from_secs(10));
    // The root; one with children, and one without.
    for missing in [vec![0], vec![8, 39]] {
        let store = Values::default();
        let began = Instant::now();
        let here = |rank: usize| !missing.contains(&rank);
        let outcomes = ranks(size, here, |rank| {
            Communicator::make(&store, ("making it", "late"), rank, size, timeout, None).err()
        });
        assert!(began.elapsed() < timeout + Duration::from_secs(20));
        for (rank, outcome) in outcomes {
            let error = outcome.unwrap();
            let Error::Timeout { missing: named, .. } = &error else { panic!("rank {rank}: {error}") };
            assert_eq!(*named, missing, "rank {rank}: {error}");
        }
    }
}

#[test]
fn a_rank_that_is_late_but_comes_makes_the_group() {
    let (size, store) = (20, Values::default());
    let there = || {
        let values = store.values.lock().unwrap();
        values.keys().filter(|key| key.starts_with("smddp/card")).count()
    };
    let comms = ranks(
        size,
        |_| true,
        |rank| {
            // After all others have laid down their addresses.
            while rank == 8 && there() < size - 1 {
                thread::yield_now();
            }
            Communicator::make(&store, ("making it", "late"), rank, size, PATIENCE, None).unwrap()
        },
    );
    comms.into_iter().for_each(|(_, comm)| comm.close());
}

/// Addresses of some ranks as those of another host; what goes through it besides is kept.
struct Elsewhere {
    store: Values,
    /// Whether that host has an address at all.
    tcp: bool,
    carried: Mutex<Vec<String>>,
}

impl Store for Elsewhere {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let mut value = value.to_vec();
        if key == "smddp/card/8" || key == "smddp/card/0" {
            let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap();
            let at = value.windows(8).position(|bytes| bytes == &boot[..8]).unwrap();
            value[at] ^= 1;
            // Behind the TCP address, if there is one, is what rank 0 shares.
            let shared = value.split_off(value.len() - if key.ends_with("/0") { 33 } else { 1 });
            if !self.tcp {
                let name = b"smddp-cards-";
                let socket = value.windows(name.len()).position(|bytes| bytes == name).unwrap();
                value.truncate(socket + name.len() + 16);
                value.push(0);
            }
            value.extend(shared);
        }
        if key.starts_with("smddp/up/") {
            self.carried.lock().unwrap().push(key.to_owned());
        }
        self.store.set(key, &value)
    }
    fn has(&self, keys: &[String]) -> Result<bool> {
        self.store.has(keys)
    }
    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.store.get(key)
    }
    fn delete(&self, key: &str) -> Result<()> {
        self.store.delete(key)
    }
}

/// A rank's connection to its parent may be impossible: then the store carries what the two have to say.
#[test]
fn what_cannot_be_connected_goes_through_the_store() {
    let size = 20;
    for tcp in [true, false] {
        let elsewhere = Elsewhere { store: Values::default(), tcp, carried: Mutex::default() };
        let comms = ranks(
            size,
            |_| true,
            |rank| Communicator::make(&elsewhere, ("making it", "far"), rank, size, PATIENCE, None),
        );
        for (rank, comm) in comms {
            comm.unwrap_or_else(|error| panic!("rank {rank}: {error}")).close();
        }
        let mut carried = elsewhere.carried.into_inner().unwrap();
        if !tcp {
            // Both and all of their children.
            carried.sort_by_key(|key| key["smddp/up/".len()..].parse::<usize>().unwrap());
            let children = (1..=16).map(|rank| format!("smddp/up/{rank}"));
            assert_eq!(carried, children.collect::<Vec<_>>());
        }
        let left = std::mem::take(&mut *elsewhere.store.values.lock().unwrap());
        assert!(left.is_empty(), "{:?}", left.keys());
    }
}

/// A store that fails says so at once, and the others are told.
#[test]
fn one_rank_whose_store_fails_ends_all() {
    struct Broken<'a>(&'a Values);
    impl Store for Broken<'_> {
        fn set(&self, key: &str, value: &[u8]) -> Result<()> {
            self.0.set(key, value)
        }
        fn has(&self, keys: &[String]) -> Result<bool> {
            self.0.has(keys)
        }
        fn get(&self, _key: &str) -> Result<Vec<u8>> {
            Err(Error::System { what: "the store".into(), why: "it is on fire".into() })
        }
        fn delete(&self, key: &str) -> Result<()> {
            self.0.delete(key)
        }
    }
    let (size, store) = (10, Values::default());
    let broken = Broken(&store);
    let outcomes = ranks(
        size,
        |_| true,
        |rank| {
            let store: &dyn Store = if rank == 9 { &broken } else { &store };
            Communicator::make(store, ("making it", "broken"), rank, size, Duration::from_secs(5), None)
                .err()
                .unwrap()
        },
    );
    let (_, mine) = &outcomes[9];
    assert!(mine.to_string().contains("on fire"), "{mine}");
    for (rank, error) in &outcomes[..9] {
        assert!(!matches!(error, Error::Invalid(_)));
        let text = error.to_string();
        assert!(text.contains("rank 9 could not") && text.contains("on fire"), "rank {rank}: {text}");
    }
}

/// Replaces the kernel boot in the claim of a rank, so that it is of another host.
fn of_another_host(store: &Values, rank: usize) {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
    let mut values = store.values.lock().unwrap();
    let record = values.get_mut(&format!("smddp/held/{rank}")).unwrap();
    let at = record.windows(boot.len()).position(|bytes| bytes == boot.as_bytes()).unwrap();
    record[at] = b'x';
}

#[test]
fn a_rank_that_a_process_of_another_host_joined_as_is_named_at_the_deadline() {
    let store = Values::default();
    let call = ("init_process_group", "hosts");
    let comms = ranks(2, |_| true, |rank| Communicator::make(&store, call, rank, 2, PATIENCE, None).unwrap());
    of_another_host(&store, 1);
    let error = Communicator::make(&store, call, 1, 2, Duration::from_millis(300), None).err().unwrap();
    assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [0]), "{error}");
    let says = format!("pid {} on host", std::process::id());
    assert!(error.to_string().contains(&says) && error.to_string().contains("as rank 1 before"), "{error}");
    comms.into_iter().for_each(|(_, comm)| comm.close());
}

/// Replaces the id of the process in the claim of a rank. Its pid and host stay.
fn of_another_process(store: &Values, rank: usize) {
    let host = smddp_core::host_name();
    let mut values = store.values.lock().unwrap();
    let record = values.get_mut(&format!("smddp/held/{rank}")).unwrap();
    let host_end =
        record.windows(host.len()).position(|bytes| bytes == host.as_bytes()).unwrap() + host.len();
    // The pid is a number of variable length. Its last byte has no high bit.
    let pid_end = host_end + record[host_end..].iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
    record[pid_end] ^= 1;
}

#[test]
fn a_duplicate_with_the_pid_and_host_of_the_holder_is_refused() {
    let store = Values::default();
    let call = ("init_process_group", "namespaces");
    let comms = ranks(2, |_| true, |rank| Communicator::make(&store, call, rank, 2, PATIENCE, None).unwrap());
    (0..2).for_each(|rank| of_another_process(&store, rank));
    let error = Communicator::make(&store, call, 1, 2, PATIENCE, None).err().unwrap();
    assert!(matches!(error, Error::Topology(_)), "{error}");
    assert!(error.to_string().contains("two processes claim rank 1 of group 'namespaces'"), "{error}");
    comms.into_iter().for_each(|(_, comm)| comm.close());
}

#[test]
fn ranks_that_leave_in_good_order_delete_their_claims_alone() {
    let store = Values::default();
    let call = ("init_process_group", "deleted");
    let claims = || store.values.lock().unwrap().keys().filter(|key| key.contains("held")).count();
    for another in [false, true] {
        let comms =
            ranks(2, |_| true, |rank| Communicator::make(&store, call, rank, 2, PATIENCE, None).unwrap());
        assert_eq!(claims(), 2);
        if another {
            of_another_process(&store, 1);
        }
        thread::scope(|scope| {
            comms.iter().for_each(|(_, comm)| _ = scope.spawn(|| comm.finish(PATIENCE).unwrap()));
        });
        assert_eq!(claims(), usize::from(another), "a claim of another process stays");
    }
}

/// A restart of one rank is possible once another rank has left and deleted its claim.
#[test]
fn a_rank_without_a_claim_has_left() {
    let store = Values::default();
    let call = ("init_process_group", "left");
    let comms = ranks(2, |_| true, |rank| Communicator::make(&store, call, rank, 2, PATIENCE, None).unwrap());
    (0..2).for_each(|rank| of_another_process(&store, rank));
    store.values.lock().unwrap().remove("smddp/held/0");
    let again = ranks(2, |_| true, |rank| Communicator::make(&store, call, rank, 2, PATIENCE, None).unwrap());
    again.into_iter().chain(comms).for_each(|(_, comm)| comm.close());
}
