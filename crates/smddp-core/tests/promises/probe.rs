//! Measurement of the network between nodes: once, with equal results on all ranks, or not at all.

use std::time::Duration;

use smddp_core::Collective;

use crate::common::TIMEOUT;
use crate::common::group::group;
use crate::common::job::Job;
use crate::common::procs::{RankProcess, start};

pub(crate) fn rank(me: &RankProcess) {
    if std::env::var("SMDDP_TEST_ABSENT").is_ok() {
        return absent(me);
    }
    let make = |name: &str, members: &[usize]| {
        let comm = group(me, &format!("{name}-{}", members[0]), members, TIMEOUT);
        me.report(&format!("{name} {}", comm.network().map_or("none".to_owned(), |known| known.to_string())));
        assert_eq!(comm.sequence(), 0, "the probe uses no collective numbers of the caller");
        let mut job = Job::new(comm.rank(), comm.size(), Collective::AllGather, 5000, 0, 0);
        job.run(&comm).unwrap();
        job.check();
        comm
    };
    let world = make("world", &(0..me.size).collect::<Vec<_>>());
    // Groups across nodes, and within one.
    let half = make("half", if me.rank.is_multiple_of(2) { &[0, 2, 4] } else { &[1, 3, 5] });
    let node = make("node", &[me.rank / 2 * 2, me.rank / 2 * 2 + 1]);
    drop((world, half, node));
    me.report("done");
}

/// Runs six ranks with two ranks per node. Returns the networks that the ranks report for each group.
fn run_six_ranks(environment: &[(&str, &str)]) -> [Vec<String>; 3] {
    let mut settings = vec![("SMDDP_SOCKET_IFNAME", "=lo"), ("SMDDP_NODE", "node {pair}")];
    settings.extend(environment);
    let mut ranks = start("probe", 6, &settings, 4 * TIMEOUT);
    let network = ["world", "half", "node"].map(|name| {
        (0..6).map(|r| ranks.wait_for(r, name).text.split_once(' ').unwrap().1.to_owned()).collect()
    });
    (0..6).for_each(|r| drop(ranks.wait_for(r, "done")));
    ranks.finish(0..6);
    network
}

#[test]
fn ranks_agree_on_the_measurement_and_later_groups_reuse_it() {
    let [world, half, node] = run_six_ranks(&[]);
    println!("{}", world[0]);
    assert!(world[0].ends_with("(measured)"), "{}", world[0]);
    assert!(world.iter().all(|network| *network == world[0]), "{world:?}");
    let again = world[0].replace("(measured)", "(measured by an earlier group)");
    assert!(half.iter().all(|network| *network == again), "{half:?}");
    assert!(node.iter().all(|network| network == "none"), "{node:?}");
}

#[test]
fn default_or_configured_network_is_used_without_a_probe() {
    let [world, half, _] = run_six_ranks(&[("SMDDP_NETWORK", "default")]);
    for network in world.iter().chain(&half) {
        assert_eq!(network, "between nodes: 15 us, 1 us a message, 9.6 Gbit/s a node (assumed)");
    }
    let [world, half, _] = run_six_ranks(&[("SMDDP_NETWORK", "latency_us=2.5,gbit=100")]);
    for network in world.iter().chain(&half) {
        assert_eq!(network, "between nodes: 2.5 us, 1 us a message, 100 Gbit/s a node (set)");
    }
}

/// Rank 1 publishes its rank information and then makes no further step.
fn absent(me: &RankProcess) {
    use crate::common::procs::{from_hex, to_hex};
    let mut pending =
        smddp_core::Pending::new("world", me.rank, me.size, Duration::from_millis(500)).unwrap();
    me.put(&format!("info/{}", me.rank), &to_hex(&pending.rank_info()));
    let infos: Vec<_> = (0..me.size).map(|r| from_hex(&me.get(&format!("info/{r}")))).collect();
    pending.trust(&infos[0]).unwrap();
    me.put(&format!("listens/{}", me.rank), "1");
    me.get("listens/1");
    if me.rank == 0 {
        me.report(&format!("error {}", pending.connect(&infos).err().unwrap()));
        me.put("over", "1");
    }
    me.get("over");
}

#[test]
fn missing_rank_is_reported_by_the_probes_timeout() {
    let settings = [("SMDDP_SOCKET_IFNAME", "=lo"), ("SMDDP_NODE", "%r"), ("SMDDP_TEST_ABSENT", "1")];
    let mut ranks = start("probe", 2, &settings, 2 * TIMEOUT);
    let text = ranks.wait_for(0, "error").text;
    assert!(
        text.contains("measuring the network between nodes (SMDDP_NETWORK=default disables it)"),
        "{text}"
    );
    assert!(text.contains("rank 1") && text.contains("Timed out"), "{text}");
    ranks.finish(0..2);
}
