//! Ranks as processes: real shared memory and sockets, the driver interface, and a fake driver behind it.

mod gpu;
mod job;
mod roles;

pub(crate) use gpu::{map_at, unmap};

use std::time::Duration;

use crate::common::procs::{RankProcess, start};

/// Time limit of a whole test on a loaded machine.
const LIMIT: Duration = Duration::from_secs(120);
const BY_REFERENCE: (&str, &str) = ("SMDDP_TEST_PATH", "by reference");
const STAGED: (&str, &str) = ("SMDDP_TEST_PATH", "through pinned host memory");
const LO: (&str, &str) = ("SMDDP_SOCKET_IFNAME", "=lo");
const PAIRS: (&str, &str) = ("SMDDP_NODE", "node {pair}");

/// Runs the role of a process that these tests start.
pub(crate) fn rank(me: &RankProcess) {
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
fn collectives_are_correct_between_processes_with_old_and_new_drivers() {
    all("every collective", 2, &[BY_REFERENCE, ("FAKE_CUDA_VERSION", "12000")]);
    all("every collective", 3, &[BY_REFERENCE, ("FAKE_CUDA_VERSION", "13000"), ("FAKE_CUDA_SEED", "3")]);
}

#[test]
fn collectives_are_correct_between_two_nodes_of_two_processes() {
    all("every collective", 4, &[BY_REFERENCE, LO, PAIRS]);
}

#[test]
fn wire_formats_give_the_results_of_host_memory() {
    for format in ["bf16", "f16", "int8"] {
        all("in a format", 4, &[LO, PAIRS, ("SMDDP_WIRE_FORMAT", format)]);
    }
    all("in a format", 4, &[LO, PAIRS, ("SMDDP_WIRE_FORMAT", "int8"), ("SMDDP_CUDA_PATH", "host")]);
    all("in a format", 3, &[LO, PAIRS, ("SMDDP_WIRE_FORMAT", "int8"), ("SMDDP_ALGO", "hier-ring")]);
}

#[test]
fn processes_without_shared_device_memory_stage_it() {
    all("every collective", 2, &[STAGED, ("FAKE_CUDA_NO_IPC", "1")]);
    all("every collective", 2, &[STAGED, ("SMDDP_CUDA_PATH", "host")]);
}

#[test]
fn memory_whose_export_fails_is_copied_to_the_groups_slab() {
    all("every collective", 2, &[BY_REFERENCE, ("FAKE_CUDA_LEAST_EXPORT", "2097152")]);
}

#[test]
fn several_groups_of_the_same_processes_work_concurrently() {
    all("several groups", 3, &[("FAKE_CUDA_SEED", "5")]);
    all("several groups", 3, &[("FAKE_CUDA_SEED", "6")]);
    all("several groups", 4, &[LO, PAIRS]);
}

#[test]
fn driver_that_waits_for_all_streams_before_mapping_causes_no_deadlock() {
    let waits = ("FAKE_CUDA_WAITS", "1");
    all("every collective", 3, &[BY_REFERENCE, waits]);
    all("every collective", 4, &[BY_REFERENCE, LO, PAIRS, waits]);
    all("several groups", 3, &[("FAKE_CUDA_SEED", "5"), waits]);
}

#[test]
fn thousands_of_calls_in_stream_order_are_correct() {
    all("soak", 2, &[("SMDDP_TEST_ITERATIONS", "1000")]);
    all(
        "soak",
        3,
        &[("SMDDP_TEST_ITERATIONS", "300"), ("FAKE_CUDA_SEED", "11"), ("FAKE_CUDA_VERSION", "12080")],
    );
}

#[test]
fn streams_that_share_one_queue_cause_no_deadlock() {
    let one = ("CUDA_DEVICE_MAX_CONNECTIONS", "1");
    all("soak", 3, &[("SMDDP_TEST_ITERATIONS", "300"), ("FAKE_CUDA_SEED", "13"), one]);
    all("several groups", 3, &[("FAKE_CUDA_SEED", "5"), one]);
}

#[test]
fn mappings_are_closed_while_device_calls_are_active() {
    all("many buffers", 2, &[]);
}

#[test]
fn killed_process_is_reported_and_streams_are_released() {
    for case in 0..15usize {
        let mut ranks = start("killed", 3, &[("SMDDP_TEST_CASE", &case.to_string())], LIMIT);
        (0..3).for_each(|rank| drop(ranks.wait_for(rank, "ready")));
        // Varies the moment of the kill.
        std::thread::park_timeout(Duration::from_micros((case as u64 * 613) % 4000));
        let victim = case % 3;
        let killed = ranks.kill(victim);
        let others = (0..3).filter(|&rank| rank != victim);
        for rank in others.clone() {
            for event in ["failed", "released"] {
                let after = ranks.wait_for(rank, event).at.saturating_duration_since(killed);
                if after > Duration::from_secs(5) {
                    ranks.fail(&format!("case {case}: rank {rank} {event} after {after:?}"));
                }
            }
        }
        ranks.finish(others);
    }
}

#[test]
fn missing_process_is_reported_and_streams_are_released() {
    for settings in [&[][..], &[LO, PAIRS]] {
        let mut ranks = start("absent", 3, settings, LIMIT);
        (0..2).for_each(|rank| drop(ranks.wait_for(rank, "failed")));
        ranks.put("over", "yes");
        ranks.finish(0..3);
    }
}
