//! The recorder's dump states for each pending call whether a thread waits in it.

use std::time::{Duration, Instant};

use serde_json::Value;
use smddp_core::{Communicator, DType, Options, Work};

use crate::common::{Gate, TIMEOUT, Wire, over};

fn recv(comm: &Communicator, into: &mut [f32], tag: u64) -> Work {
    // SAFETY: the buffer lives until the work is complete.
    unsafe { comm.recv(into.as_mut_ptr().cast(), 1, DType::F32, Some(1), tag, Options::default()) }.unwrap()
}

/// Returns the state of each pending call of this rank: true, false, or `None` if it is unknown.
fn waits(comm: &Communicator) -> Vec<Option<bool>> {
    let dump: Value = serde_json::from_str(&smddp_core::dump()).unwrap();
    let is_own = |group: &&Value| group["name"] == comm.name() && group["rank"] == comm.rank();
    let group = dump["groups"].as_array().unwrap().iter().find(is_own).unwrap();
    let pending = group["pending"].as_array().unwrap();
    for call in pending {
        assert_eq!(call["waits"] == true, call["waited_seconds"].is_f64(), "{call}");
    }
    pending.iter().map(|call| call["waits"].as_bool()).collect()
}

fn wait_for(comm: &Communicator, expected: &[Option<bool>]) {
    let begun = Instant::now();
    while waits(comm) != expected {
        assert!(begun.elapsed() < TIMEOUT, "{:?}, expected {expected:?}", waits(comm));
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn dump_distinguishes_posted_messages_from_those_that_a_thread_waits_in() {
    let gate = Gate::new(2);
    over(Wire::Shm.links(2), TIMEOUT, |comm| {
        if comm.rank() == 1 {
            gate.wait();
            for tag in [1, 2] {
                let data = [tag as f32];
                // SAFETY: the data lives until the work is complete.
                let sent =
                    unsafe { comm.send(data.as_ptr().cast(), 1, DType::F32, 0, tag, Options::default()) };
                sent.unwrap().wait(None).unwrap();
            }
            return;
        }
        let mut into = [[0f32], [0f32]];
        let [first, second] = &mut into;
        let (first, second) = (recv(comm, first, 1), recv(comm, second, 2));
        assert_eq!(waits(comm), [Some(false); 2]);
        std::thread::scope(|scope| {
            // A wait with a time limit counts, too.
            scope.spawn(|| first.wait(Some(TIMEOUT)).unwrap());
            wait_for(comm, &[Some(true), Some(false)]);
            // The code behind a callback may wait for the call.
            second.on_done(Box::new(|| {}));
            assert_eq!(waits(comm), [Some(true), None]);
            gate.wait();
        });
        second.wait(None).unwrap();
        assert_eq!((waits(comm), into), (Vec::new(), [[1.0], [2.0]]));
    });
}
