//! Groups that ranks as threads create through a store: exchange of the ranks' information over the tree.

use std::collections::HashMap;
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use smddp_core::{Communicator, Deletion, Error, Result, Store};

const TIMEOUT: Duration = Duration::from_secs(60);

/// A store in this process, which counts the transferred bytes.
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

/// Runs the participating ranks as threads and returns their results.
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
fn groups_of_all_sizes_start_and_delete_their_keys() {
    for size in [1, 2, 3, 8, 9, 17, 80] {
        let store = Values::default();
        let over = Barrier::new(size);
        for (rank, comm) in ranks(
            size,
            |_| true,
            |rank| {
                let comm = Communicator::make(&store, ("create_group", "all"), rank, size, TIMEOUT, None);
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
fn store_traffic_per_rank_is_independent_of_group_size() {
    let (size, store) = (120, Values::default());
    let comms = ranks(
        size,
        |_| true,
        |rank| Communicator::make(&store, ("create_group", "few"), rank, size, TIMEOUT, None).unwrap(),
    );
    let each = *store.bytes.lock().unwrap() / size;
    // Its own address, its parent's address, and polls; a loaded machine makes more of them.
    assert!(each < 6_000, "{each} bytes per rank");
    comms.into_iter().for_each(|(_, comm)| comm.close());
}

#[test]
fn missing_ranks_are_reported_by_all_others_at_the_timeout() {
    // Much longer than the ranks need.
    let (size, timeout) = (40, Duration::from_secs(10));
    // The root; then one rank with children and one without.
    for missing in [vec![0], vec![8, 39]] {
        let store = Values::default();
        let begun = Instant::now();
        let here = |rank: usize| !missing.contains(&rank);
        let outcomes = ranks(size, here, |rank| {
            Communicator::make(&store, ("create_group", "late"), rank, size, timeout, None).err()
        });
        assert!(begun.elapsed() < timeout + Duration::from_secs(20));
        for (rank, outcome) in outcomes {
            let error = outcome.unwrap();
            let Error::Timeout { missing: reported, .. } = &error else { panic!("rank {rank}: {error}") };
            assert_eq!(*reported, missing, "rank {rank}: {error}");
        }
    }
}

#[test]
fn late_rank_joins_the_group() {
    let (size, store) = (20, Values::default());
    let published = || {
        let values = store.values.lock().unwrap();
        values.keys().filter(|key| key.starts_with("smddp/card")).count()
    };
    let comms = ranks(
        size,
        |_| true,
        |rank| {
            // Waits until all other ranks have published their addresses.
            while rank == 8 && published() < size - 1 {
                thread::yield_now();
            }
            Communicator::make(&store, ("create_group", "late"), rank, size, TIMEOUT, None).unwrap()
        },
    );
    comms.into_iter().for_each(|(_, comm)| comm.close());
}

/// Store that replaces the addresses of some ranks by those of another host, and records the relayed keys.
struct OtherHost {
    store: Values,
    /// The other host has a TCP address.
    tcp: bool,
    carried: Mutex<Vec<String>>,
}

impl Store for OtherHost {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let mut value = value.to_vec();
        if key == "smddp/card/8" || key == "smddp/card/0" {
            let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap();
            let at = value.windows(8).position(|bytes| bytes == &boot[..8]).unwrap();
            value[at] ^= 1;
            // Rank 0's shared settings follow the TCP address, if there is one.
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

/// A rank that cannot connect to its parent must exchange data with it through the store.
#[test]
fn unreachable_parent_is_replaced_by_the_store() {
    let size = 20;
    for tcp in [true, false] {
        let other_host = OtherHost { store: Values::default(), tcp, carried: Mutex::default() };
        let comms = ranks(
            size,
            |_| true,
            |rank| Communicator::make(&other_host, ("create_group", "remote"), rank, size, TIMEOUT, None),
        );
        for (rank, comm) in comms {
            comm.unwrap_or_else(|error| panic!("rank {rank}: {error}")).close();
        }
        let mut carried = other_host.carried.into_inner().unwrap();
        if !tcp {
            // Both ranks and all of their children.
            carried.sort_by_key(|key| key["smddp/up/".len()..].parse::<usize>().unwrap());
            let children = (1..=16).map(|rank| format!("smddp/up/{rank}"));
            assert_eq!(carried, children.collect::<Vec<_>>());
        }
        let left = std::mem::take(&mut *other_host.store.values.lock().unwrap());
        assert!(left.is_empty(), "{:?}", left.keys());
    }
}

/// A failing store must end the start immediately on all ranks.
#[test]
fn store_failure_on_one_rank_fails_all_ranks() {
    struct Broken<'a>(&'a Values);
    impl Store for Broken<'_> {
        fn set(&self, key: &str, value: &[u8]) -> Result<()> {
            self.0.set(key, value)
        }
        fn has(&self, keys: &[String]) -> Result<bool> {
            self.0.has(keys)
        }
        fn get(&self, _key: &str) -> Result<Vec<u8>> {
            Err(Error::System { operation: "the store".into(), reason: "injected failure".into() })
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
            Communicator::make(store, ("create_group", "broken"), rank, size, Duration::from_secs(5), None)
                .err()
                .unwrap()
        },
    );
    let (_, mine) = &outcomes[9];
    assert!(mine.to_string().contains("injected failure"), "{mine}");
    for (rank, error) in &outcomes[..9] {
        assert!(!matches!(error, Error::Invalid(_)));
        let text = error.to_string();
        assert!(text.contains("rank 9 failed") && text.contains("injected failure"), "rank {rank}: {text}");
    }
}

/// Replaces the kernel boot id in the claim of a rank, as if the process ran on another host.
fn move_to_another_host(store: &Values, rank: usize) {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().to_owned();
    let mut values = store.values.lock().unwrap();
    let record = values.get_mut(&format!("smddp/held/{rank}")).unwrap();
    let at = record.windows(boot.len()).position(|bytes| bytes == boot.as_bytes()).unwrap();
    record[at] = b'x';
}

#[test]
fn rank_claimed_on_another_host_is_reported_at_the_timeout() {
    let store = Values::default();
    let call = ("init_process_group", "hosts");
    let comms = ranks(2, |_| true, |rank| Communicator::make(&store, call, rank, 2, TIMEOUT, None).unwrap());
    move_to_another_host(&store, 1);
    let error = Communicator::make(&store, call, 1, 2, Duration::from_millis(300), None).err().unwrap();
    assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [0]), "{error}");
    let holder = format!("pid {} on host", std::process::id());
    assert!(error.to_string().contains(&holder) && error.to_string().contains("as rank 1 before"), "{error}");
    comms.into_iter().for_each(|(_, comm)| comm.close());
}

/// Replaces the id of the process in the claim of a rank. Its pid and host are unchanged.
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
    let comms = ranks(2, |_| true, |rank| Communicator::make(&store, call, rank, 2, TIMEOUT, None).unwrap());
    (0..2).for_each(|rank| of_another_process(&store, rank));
    let error = Communicator::make(&store, call, 1, 2, TIMEOUT, None).err().unwrap();
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
            ranks(2, |_| true, |rank| Communicator::make(&store, call, rank, 2, TIMEOUT, None).unwrap());
        assert_eq!(claims(), 2);
        if another {
            of_another_process(&store, 1);
        }
        thread::scope(|scope| {
            comms.iter().for_each(|(_, comm)| _ = scope.spawn(|| comm.shutdown_checked(TIMEOUT).unwrap()));
        });
        assert_eq!(claims(), usize::from(another), "a claim of another process stays");
    }
}

/// A restart of one rank is possible once another rank has left and deleted its claim.
#[test]
fn a_rank_without_a_claim_has_left() {
    let store = Values::default();
    let call = ("init_process_group", "left");
    let comms = ranks(2, |_| true, |rank| Communicator::make(&store, call, rank, 2, TIMEOUT, None).unwrap());
    (0..2).for_each(|rank| of_another_process(&store, rank));
    store.values.lock().unwrap().remove("smddp/held/0");
    let again = ranks(2, |_| true, |rank| Communicator::make(&store, call, rank, 2, TIMEOUT, None).unwrap());
    again.into_iter().chain(comms).for_each(|(_, comm)| comm.close());
}
