//! The network between nodes: measured once, by all ranks alike, or not at all.

use std::time::Duration;

use smddp_core::Collective;

use crate::common::PATIENCE;
use crate::common::group::group;
use crate::common::job::Job;
use crate::common::procs::{Me, start};

pub(crate) fn rank(me: &Me) {
    if std::env::var("SMDDP_TEST_ABSENT").is_ok() {
        return absent(me);
    }
    let made = |name: &str, members: &[usize]| {
        let comm = group(me, &format!("{name}-{}", members[0]), members, PATIENCE);
        me.say(&format!("{name} {}", comm.network().map_or("none".to_owned(), |known| known.to_string())));
        assert_eq!(comm.sequence(), 0, "the numbers of collectives are the caller's");
        let mut job = Job::new(comm.rank(), comm.size(), Collective::AllGather, 5000, 0, 0);
        job.run(&comm).unwrap();
        job.check();
        comm
    };
    let world = made("world", &(0..me.size).collect::<Vec<_>>());
    // Across nodes, and within one.
    let half = made("half", if me.rank.is_multiple_of(2) { &[0, 2, 4] } else { &[1, 3, 5] });
    let node = made("node", &[me.rank / 2 * 2, me.rank / 2 * 2 + 1]);
    drop((world, half, node));
    me.say("done");
}

/// Each pair of ranks on a node of its own.
fn six(environment: &[(&str, &str)]) -> [Vec<String>; 3] {
    let mut settings = vec![("SMDDP_SOCKET_IFNAME", "=lo"), ("SMDDP_NODE", "node {pair}")];
    settings.extend(environment);
    let mut ranks = start("probe", 6, &settings, 4 * PATIENCE);
    let told = ["world", "half", "node"]
        .map(|name| (0..6).map(|r| ranks.hear(r, name).text.split_once(' ').unwrap().1.to_owned()).collect());
    (0..6).for_each(|r| drop(ranks.hear(r, "done")));
    ranks.finish(0..6);
    told
}

#[test]
fn all_ranks_agree_on_what_was_measured_and_no_later_group_measures_again() {
    let [world, half, node] = six(&[]);
    println!("{}", world[0]);
    assert!(world[0].ends_with("(measured)"), "{}", world[0]);
    assert!(world.iter().all(|told| *told == world[0]), "{world:?}");
    let again = world[0].replace("(measured)", "(measured by an earlier group)");
    assert!(half.iter().all(|told| *told == again), "{half:?}");
    assert!(node.iter().all(|told| told == "none"), "{node:?}");
}

#[test]
fn without_a_probe_a_usual_network_is_assumed_and_a_named_one_is_taken() {
    let [world, half, _] = six(&[("SMDDP_PROBE", "0")]);
    for told in world.iter().chain(&half) {
        assert_eq!(told, "between nodes: 15 us, 1 us a message, 9.6 Gbit/s a node (assumed)");
    }
    let [world, half, _] = six(&[("SMDDP_NETWORK", "latency_us=2.5,gbit=100")]);
    for told in world.iter().chain(&half) {
        assert_eq!(told, "between nodes: 2.5 us, 1 us a message, 100 Gbit/s a node (set)");
    }
}

/// Rank 1 has a card, and makes no second step.
fn absent(me: &Me) {
    use crate::common::procs::{from_hex, to_hex};
    let mut pending =
        smddp_core::Pending::new("world", me.rank, me.size, Duration::from_millis(500)).unwrap();
    me.put(&format!("card/{}", me.rank), &to_hex(&pending.card()));
    let cards: Vec<_> = (0..me.size).map(|r| from_hex(&me.get(&format!("card/{r}")))).collect();
    pending.trust(&cards[0]).unwrap();
    me.put(&format!("hears/{}", me.rank), "1");
    me.get("hears/1");
    if me.rank == 0 {
        me.say(&format!("error {}", pending.connect(&cards).err().unwrap()));
        me.put("over", "1");
    }
    me.get("over");
}

#[test]
fn a_rank_that_does_not_connect_is_told_by_the_groups_timeout() {
    let settings = [("SMDDP_SOCKET_IFNAME", "=lo"), ("SMDDP_SHM", "0"), ("SMDDP_TEST_ABSENT", "1")];
    let mut ranks = start("probe", 2, &settings, 2 * PATIENCE);
    let text = ranks.hear(0, "error").text;
    assert!(text.contains("measuring the network between nodes (SMDDP_PROBE=0 goes without)"), "{text}");
    assert!(text.contains("rank 1") && text.contains("Timed out"), "{text}");
    ranks.finish(0..2);
}
