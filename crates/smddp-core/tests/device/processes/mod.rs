//! Ranks as processes: real shared memory and sockets, the driver's own interface, and a fake of the driver behind it.

mod gpu;
mod job;
mod roles;

pub(crate) use gpu::{map_at, unmap};

use std::time::Duration;

use crate::common::procs::{Me, start};

/// A whole test, on a machine that does other things besides.
const LIMIT: Duration = Duration::from_secs(120);
const BY_REFERENCE: (&str, &str) = ("SMDDP_TEST_PATH", "by reference");
const STAGED: (&str, &str) = ("SMDDP_TEST_PATH", "through pinned host memory");
const LO: (&str, &str) = ("SMDDP_SOCKET_IFNAME", "=lo");
const PAIRS: (&str, &str) = ("SMDDP_NODE", "node {pair}");

/// Not a promise of its own: the entry of the processes that these tests start.
pub(crate) fn rank(me: &Me) {
    match me.role.as_str() {
        "every collective" => roles::every_collective(me),
        "in a format" => roles::in_a_format(me),
        "several groups" => roles::several_groups(me),
        "soak" => roles::soak(me),
        "many buffers" => roles::many_buffers(me),
        "killed" => roles::killed(me),
        "absent" => roles::absent(me),
        other => panic!("no role `{other}`"),
    }
}

fn all(role: &str, size: usize, settings: &[(&str, &str)]) {
    start(role, size, settings, LIMIT).finish(0..size);
}

#[test]
fn every_collective_is_right_between_processes_with_an_old_driver_and_a_new_one() {
    all("every collective", 2, &[BY_REFERENCE, ("FAKE_CUDA_VERSION", "12000")]);
    all("every collective", 3, &[BY_REFERENCE, ("FAKE_CUDA_VERSION", "13000"), ("FAKE_CUDA_SEED", "3")]);
}

#[test]
fn every_collective_is_right_between_two_nodes_of_two_processes() {
    all("every collective", 4, &[BY_REFERENCE, LO, PAIRS]);
}

#[test]
fn what_travels_between_nodes_in_a_format_comes_to_what_it_does_on_host_memory() {
    for format in ["bf16", "f16", "int8"] {
        all("in a format", 4, &[LO, PAIRS, ("SMDDP_WIRE_FORMAT", format)]);
    }
    all("in a format", 4, &[LO, PAIRS, ("SMDDP_WIRE_FORMAT", "int8"), ("SMDDP_CUDA_PATH", "host")]);
    all("in a format", 3, &[LO, PAIRS, ("SMDDP_WIRE_FORMAT", "int8"), ("SMDDP_ALGO", "hier-ring")]);
}

#[test]
fn processes_that_may_not_share_device_memory_stage_it_and_say_so() {
    all("every collective", 2, &[STAGED, ("FAKE_CUDA_NO_IPC", "1")]);
    all("every collective", 2, &[STAGED, ("SMDDP_CUDA_PATH", "host")]);
}

#[test]
fn memory_that_turns_out_not_to_be_exported_is_copied_to_whole_blocks_of_the_groups_own() {
    all("every collective", 2, &[BY_REFERENCE, ("FAKE_CUDA_LEAST_EXPORT", "2097152")]);
}

#[test]
fn groups_of_the_same_processes_work_at_once_and_come_and_go() {
    all("several groups", 3, &[("FAKE_CUDA_SEED", "5")]);
    all("several groups", 3, &[("FAKE_CUDA_SEED", "6")]);
    all("several groups", 4, &[LO, PAIRS]);
}

#[test]
fn a_driver_that_waits_for_all_streams_before_it_maps_memory_holds_nobody_up() {
    let waits = ("FAKE_CUDA_WAITS", "1");
    all("every collective", 3, &[BY_REFERENCE, waits]);
    all("every collective", 4, &[BY_REFERENCE, LO, PAIRS, waits]);
    all("several groups", 3, &[("FAKE_CUDA_SEED", "5"), waits]);
}

#[test]
fn thousands_of_calls_in_the_order_of_a_stream_are_right() {
    all("soak", 2, &[("SMDDP_TEST_TURNS", "1000")]);
    all("soak", 3, &[("SMDDP_TEST_TURNS", "300"), ("FAKE_CUDA_SEED", "11"), ("FAKE_CUDA_VERSION", "12080")]);
}

#[test]
fn streams_that_share_one_queue_do_not_wait_for_what_comes_behind_them() {
    let one = ("CUDA_DEVICE_MAX_CONNECTIONS", "1");
    all("soak", 3, &[("SMDDP_TEST_TURNS", "300"), ("FAKE_CUDA_SEED", "13"), one]);
    all("several groups", 3, &[("FAKE_CUDA_SEED", "5"), one]);
}

#[test]
fn mappings_are_closed_while_calls_are_on_the_device() {
    all("many buffers", 2, &[]);
}

#[test]
fn a_killed_process_is_named_by_the_others_and_their_streams_go_on() {
    for case in 0..15usize {
        let mut ranks = start("killed", 3, &[("SMDDP_TEST_CASE", &case.to_string())], LIMIT);
        (0..3).for_each(|rank| drop(ranks.hear(rank, "ready")));
        // Not a wait for anything: it moves the blow to another moment.
        std::thread::park_timeout(Duration::from_micros((case as u64 * 613) % 4000));
        let victim = case % 3;
        let killed = ranks.kill(victim);
        let others = (0..3).filter(|&rank| rank != victim);
        for rank in others.clone() {
            for what in ["failed", "released"] {
                let after = ranks.hear(rank, what).at.saturating_duration_since(killed);
                if after > Duration::from_secs(5) {
                    ranks.fail(&format!("case {case}: rank {rank} {what} after {after:?}"));
                }
            }
        }
        ranks.finish(others);
    }
}

#[test]
fn a_process_that_does_not_make_the_call_is_named_and_the_callers_streams_go_on() {
    for settings in [&[][..], &[LO, PAIRS]] {
        let mut ranks = start("absent", 3, settings, LIMIT);
        (0..2).for_each(|rank| drop(ranks.hear(rank, "failed")));
        ranks.put("over", "yes");
        ranks.finish(0..3);
    }
}
