//! Tests of the simulator with programs whose times can be computed by hand.

use std::collections::BTreeMap;

use super::*;
use crate::algorithms::Algorithm;
use crate::choice::{Counts, GroupShape, Memory, Settings, Shape, alternatives};
use crate::ir::{Channel, Collective, Program, Source, Span, Step, Timed};

/// Network: 1 GB/s, 10 us, no cost per message. Inside nodes: 10 GB/s, 1 us.
fn cluster(ranks: &[usize]) -> Cluster {
    Cluster {
        name: "test".into(),
        ranks: ranks.to_vec(),
        local: Port { bytes_per_s: 10e9, latency_s: 1e-6, message_s: 0.0 },
        local_multicast: false,
        network: Port { bytes_per_s: 1e9, latency_s: 10e-6, message_s: 0.0 },
        rails: ranks.iter().copied().max().unwrap_or(1),
        window: u64::MAX,
        incast: 1.0,
        memory_bytes_per_s: None,
        uplink_bytes_per_s: None,
        overrides: BTreeMap::new(),
    }
}

fn load(size: usize, block: u64) -> Load {
    Load {
        blocks: Blocks::Row { bytes: block * size as u64, each: block, count: size as u64 },
        segment: block,
        depth: 2,
        format: None,
        watch: vec![],
    }
}

fn step(step: Step) -> Timed {
    Timed { lag: 0, step }
}

fn send(channel: usize, block: usize) -> Timed {
    step(Step::Send { channel, source: Span::input(block), tee: None })
}

fn receive(rank: usize, channel: usize, reader: usize, block: usize) -> Timed {
    let message = Span::input(block);
    let from = Source { rank, channel, reader, message, take: (0, 1) };
    step(Step::Receive { from, to: Span::output(block), forward: None })
}

fn to(readers: &[usize]) -> Channel {
    Channel { readers: readers.to_vec() }
}

fn microseconds(cluster: &Cluster, block: u64, programs: Vec<Program>) -> f64 {
    let mut programs = programs.into_iter();
    let outcome = replay(cluster, &load(cluster.size(), block), |_| programs.next().unwrap()).unwrap();
    outcome.seconds * 1e6
}

fn close(value: f64, expected: f64) {
    assert!((value - expected).abs() < 1e-3, "{value}, not {expected}");
}

#[test]
fn single_transfer_takes_latency_plus_bytes_over_rate() {
    let programs = || {
        vec![
            Program::single_pipeline(vec![to(&[1])], vec![send(0, 0)]),
            Program::single_pipeline(vec![], vec![receive(0, 0, 0, 0)]),
        ]
    };
    close(microseconds(&cluster(&[1, 1]), 50_000, programs()), 10.0 + 50.0);
    close(microseconds(&cluster(&[2]), 50_000, programs()), 1.0 + 5.0);
    let mut slow = cluster(&[1, 1]);
    slow.network.message_s = 3e-6;
    close(microseconds(&slow, 50_000, programs()), 3.0 + 10.0 + 50.0);
}

#[test]
fn two_transfers_share_one_port() {
    // One sender, two receivers; then two senders, one receiver.
    let fan = vec![
        Program::single_pipeline(vec![to(&[1]), to(&[2])], vec![send(0, 0), send(1, 0)]),
        Program::single_pipeline(vec![], vec![receive(0, 0, 0, 0)]),
        Program::single_pipeline(vec![], vec![receive(0, 1, 0, 0)]),
    ];
    close(microseconds(&cluster(&[1, 1, 1]), 50_000, fan), 10.0 + 100.0);
    let incast = vec![
        Program::single_pipeline(vec![], vec![receive(1, 0, 0, 1), receive(2, 0, 0, 2)]),
        Program::single_pipeline(vec![to(&[0])], vec![send(0, 1)]),
        Program::single_pipeline(vec![to(&[0])], vec![send(0, 2)]),
    ];
    close(microseconds(&cluster(&[1, 1, 1]), 50_000, incast), 10.0 + 100.0);
}

#[test]
fn incast_slows_queued_messages_of_other_nodes() {
    let incast = |second: usize| {
        let mut programs = vec![Program::default(); 4];
        programs[0] =
            Program::single_pipeline(vec![], vec![receive(2, 0, 0, 2), receive(second, 0, 0, second)]);
        programs[2] = Program::single_pipeline(vec![to(&[0])], vec![send(0, 2)]);
        programs[second] = Program::single_pipeline(vec![to(&[0])], vec![send(0, second)]);
        programs
    };
    let cluster = Cluster { incast: 1.25, rails: 1, ..cluster(&[1, 1, 2]) };
    // First from one node, whose messages alternate; then from two.
    close(microseconds(&cluster, 50_000, incast(3)), 10.0 + 100.0);
    close(microseconds(&cluster, 50_000, incast(1)), 10.0 + 50.0 + 62.5);
}

#[test]
fn directions_of_a_port_are_independent() {
    let exchange = vec![
        Program::single_pipeline(vec![to(&[1])], vec![send(0, 0), receive(1, 0, 0, 1)]),
        Program::single_pipeline(vec![to(&[0])], vec![send(0, 1), receive(0, 0, 0, 0)]),
    ];
    close(microseconds(&cluster(&[1, 1]), 50_000, exchange), 10.0 + 50.0);
}

#[test]
fn ranks_share_or_bundle_rails() {
    // Ranks 0 and 1 send to 2 and 3 of the other node.
    let programs = || {
        vec![
            Program::single_pipeline(vec![to(&[2])], vec![send(0, 0)]),
            Program::single_pipeline(vec![to(&[3])], vec![send(0, 1)]),
            Program::single_pipeline(vec![], vec![receive(0, 0, 0, 0)]),
            Program::single_pipeline(vec![], vec![receive(1, 0, 0, 1)]),
        ]
    };
    for (rails, expected) in [(1, 110.0), (2, 60.0), (4, 35.0)] {
        let cluster = Cluster { rails, ..cluster(&[2, 2]) };
        close(microseconds(&cluster, 50_000, programs()), expected);
    }
    let uplink = Cluster { uplink_bytes_per_s: Some(0.5e9), ..cluster(&[2, 2]) };
    close(microseconds(&uplink, 50_000, programs()), 210.0);
}

#[test]
fn local_write_costs_one_copy_per_reader_without_multicast() {
    let programs = || {
        let read = |reader| Program::single_pipeline(vec![], vec![receive(0, 0, reader, 0)]);
        vec![Program::single_pipeline(vec![to(&[1, 2])], vec![send(0, 0)]), read(0), read(1)]
    };
    close(microseconds(&cluster(&[3]), 50_000, programs()), 1.0 + 10.0);
    let shared = Cluster { local_multicast: true, ..cluster(&[3]) };
    close(microseconds(&shared, 50_000, programs()), 1.0 + 5.0);
}

#[test]
fn full_channel_waits_for_its_reader() {
    // Four messages through two slots: the third is sent after the credit of the first arrives.
    let blocks = |n: usize| (0..n).map(|b| send(0, b)).collect();
    let programs = vec![
        Program::single_pipeline(vec![to(&[1])], blocks(4)),
        Program::single_pipeline(vec![], (0..4).map(|b| receive(0, 0, 0, b)).collect()),
    ];
    let cluster = cluster(&[1, 1]);
    let load = Load {
        blocks: Blocks::Row { bytes: 4000, each: 1000, count: 4 },
        segment: 1000,
        depth: 2,
        format: None,
        watch: vec![],
    };
    let mut programs = programs.into_iter();
    let outcome = replay(&cluster, &load, |_| programs.next().unwrap()).unwrap();
    // First read at 11, credit at 21; the third arrives at 32, the fourth at 33.
    close(outcome.seconds * 1e6, 33.0);
    assert_eq!(outcome.out_bytes, [4000, 0]);
    assert_eq!(outcome.in_bytes, [0, 4000]);
}

#[test]
fn window_limits_bytes_in_flight() {
    let programs = || {
        vec![
            Program::single_pipeline(vec![to(&[1]), to(&[1])], vec![send(0, 0), send(1, 1)]),
            Program::single_pipeline(vec![], vec![receive(0, 0, 0, 0), receive(0, 1, 0, 1)]),
        ]
    };
    close(microseconds(&cluster(&[1, 1]), 1000, programs()), 12.0);
    // The second is sent after the completion of the first.
    let narrow = Cluster { window: 1000, ..cluster(&[1, 1]) };
    close(microseconds(&narrow, 1000, programs()), 11.0 + 10.0 + 11.0);
}

#[test]
fn memory_passes_take_time() {
    let copy = Step::Copy { source: Span::input(0), to: Span::output(0), finish: false };
    let cluster = Cluster { memory_bytes_per_s: Some(1e9), ..cluster(&[1]) };
    close(microseconds(&cluster, 5000, vec![Program::single_pipeline(vec![], vec![step(copy)])]), 5.0);
}

#[test]
fn deadlock_reports_rank_and_step() {
    let programs = vec![
        Program::single_pipeline(vec![to(&[1])], vec![receive(1, 0, 0, 1), send(0, 0)]),
        Program::single_pipeline(vec![to(&[0])], vec![receive(0, 0, 0, 0), send(0, 1)]),
    ];
    let mut programs = programs.into_iter();
    let cluster = cluster(&[1, 1]);
    let blocked = replay(&cluster, &load(2, 8), |_| programs.next().unwrap()).unwrap_err();
    assert_eq!(blocked, Deadlock { pipelines: 2, rank: 0, step: 0 });
}

#[test]
fn critical_path_lists_waiting_and_awaited_ranks() {
    // 0 -> 1 -> 2
    let from =
        |rank, block| Source { rank, channel: 0, reader: 0, message: Span::input(block), take: (0, 1) };
    let programs = vec![
        Program::single_pipeline(vec![to(&[1])], vec![send(0, 0)]),
        Program::single_pipeline(
            vec![to(&[2])],
            vec![step(Step::Receive { from: from(0, 0), to: Span::output(0), forward: Some(0) })],
        ),
        Program::single_pipeline(
            vec![],
            vec![step(Step::Receive {
                from: Source { message: Span::output(0), ..from(1, 0) },
                to: Span::output(0),
                forward: None,
            })],
        ),
    ];
    let mut programs = programs.into_iter();
    let cluster = cluster(&[1, 1, 1]);
    let outcome = replay(&cluster, &load(3, 5000), |_| programs.next().unwrap()).unwrap();
    let hops: Vec<_> = outcome.path.iter().map(|s| (s.on, s.rank, s.wait)).collect();
    assert_eq!(hops, [(Some(0), 1, Wait::Network), (Some(1), 2, Wait::Network)]);
    let sum = PathSummary::of(&outcome.path, outcome.seconds);
    close(sum.network * 1e6, 30.0);
    close(sum.work * 1e6 + sum.queue * 1e6, 0.0);
}

/// Returns the segmentations of a call that are worth simulating.
fn cuts(cluster: &Cluster, collective: Collective, algorithm: Algorithm, bytes: u64) -> Vec<Job> {
    let topology = cluster.topology();
    let group = GroupShape { topology: &topology, inline_bytes: 0, network: cluster.network_model() };
    let counts = Counts::of_buffer(collective, bytes as usize, cluster.size());
    let shape = Shape { collective, element: 1, half: false, single: false, counts, memory: Memory::Host };
    let all = alternatives(&shape, &group, &Settings::default());
    let of: Vec<_> = all.into_iter().filter(|decision| decision.choice.algorithm == algorithm).collect();
    // Segments smaller than the default take long to simulate.
    let coarse = of.first().map_or(0, |own| own.choice.segment);
    of.into_iter()
        .filter(|decision| decision.choice.segment >= coarse)
        .map(|decision| Job { collective, root: 0, decision })
        .collect()
}

fn run(cluster: &Cluster, collective: Collective, algorithm: Algorithm, bytes: u64) -> Run {
    let jobs = cuts(cluster, collective, algorithm, bytes);
    let runs = jobs.iter().map(|job| job.run(cluster, vec![]).unwrap());
    runs.min_by(|a, b| a.outcome.seconds.total_cmp(&b.outcome.seconds)).unwrap()
}

#[test]
fn balanced_mesh_reaches_line_rate() {
    for nodes in 2..=17 {
        let cluster = cluster(&vec![1; nodes]);
        let run = run(&cluster, Collective::AllGather, Algorithm::Mesh, 64 << 20);
        let share = run.line_share.unwrap();
        assert!((0.99..=1.0).contains(&share), "{nodes} nodes: {share}");
    }
}

#[test]
fn every_algorithm_completes() {
    for algorithm in Algorithm::ALL {
        for collective in Collective::ALL {
            for ranks in [&[1, 1][..], &[3], &[2, 1, 2], &[2, 2, 2, 2]] {
                let cluster = cluster(ranks);
                for job in cuts(&cluster, collective, algorithm, 1_000_003) {
                    let run = job.run(&cluster, vec![0]).unwrap();
                    assert!(run.outcome.seconds > 0.0, "{job:?}");
                    let (out, inward) = (&run.outcome.out_bytes, &run.outcome.in_bytes);
                    assert_eq!(out.iter().sum::<u64>(), inward.iter().sum::<u64>(), "{job:?}");
                }
            }
        }
    }
}

fn best(cluster: &Cluster, collective: Collective, bytes: u64) -> Run {
    let runs = [Algorithm::HierMesh, Algorithm::HierRing].map(|a| run(cluster, collective, a, bytes));
    runs.into_iter().min_by(|a, b| a.outcome.seconds.total_cmp(&b.outcome.seconds)).unwrap()
}

#[test]
fn large_calls_are_within_ten_percent_of_the_bound() {
    for nodes in [2, 3, 4, 6, 7, 11, 16, 32] {
        let cluster = Cluster::p4d(nodes);
        for collective in [Collective::AllGather, Collective::ReduceScatter] {
            let run = best(&cluster, collective, 256 << 20);
            let share = run.line_share.unwrap();
            // With 32 nodes the staging memory holds only two slots per channel.
            let least = if nodes < 32 { 1.0 / 1.1 } else { 1.0 / 1.12 };
            assert!(share > least, "{collective:?} {nodes}: {share} by {:?}", run.job.decision.choice);
        }
    }
}

#[test]
fn each_byte_crosses_a_node_link_once() {
    // Uneven nodes, and blocks that differ by one byte.
    for (ranks, bytes) in [(vec![2; 4], 4 << 20), (vec![1, 3, 2], 6_000_000), (vec![3; 5], 1_000_003)] {
        let cluster = cluster(&ranks);
        let size = cluster.size() as u64;
        let each = bytes / size;
        for algorithm in [Algorithm::HierMesh, Algorithm::HierRing, Algorithm::HierLog] {
            for job in cuts(&cluster, Collective::AllGather, algorithm, bytes) {
                let run = job.run(&cluster, vec![]).unwrap();
                for (node, &ranks) in cluster.ranks.iter().enumerate() {
                    assert_eq!(run.outcome.in_bytes[node], each * (size - ranks as u64), "{job:?}");
                }
                let out: u64 = run.outcome.out_bytes.iter().sum();
                assert_eq!(out, (ranks.len() as u64 - 1) * each * size, "{job:?}");
            }
        }
        let least = link_bytes_least(&cluster, Collective::AllGather, bytes, 0);
        assert_eq!(least.len(), ranks.len());
    }
}

#[test]
fn link_bytes_match_the_formula() {
    let cluster = Cluster::p4d(4);
    let quarter = 64 << 20;
    for (collective, expected) in [
        (Collective::AllGather, (quarter, 3 * quarter)),
        (Collective::ReduceScatter, (3 * quarter, quarter)),
        (Collective::AllReduce, (6 * quarter, 6 * quarter)),
        (Collective::AllToAll, (24 * quarter, 24 * quarter)),
    ] {
        assert_eq!(link_bytes_least(&cluster, collective, 256 << 20, 0), [expected; 4], "{collective:?}");
    }
    close(line_seconds(&cluster, Collective::AllGather, 256 << 20, 0) * 50e9, (3 * quarter) as f64);
}

#[test]
fn node_at_half_rate_at_most_doubles_the_time() {
    let whole = Cluster::p4d(8);
    let slow = Override { rail_bytes_per_s: Some(6.25e9), ..Override::default() };
    let lost = Override { rails: Some(3), ..Override::default() };
    let narrow = Override { uplink_bytes_per_s: Some(25e9), ..Override::default() };
    let time = |cluster: &Cluster| best(cluster, Collective::AllGather, 256 << 20).outcome.seconds;
    let even = time(&whole);
    for (change, most) in [(slow, 2.02), (lost, 2.02), (narrow, 2.02)] {
        let cluster = Cluster { overrides: BTreeMap::from([(3, change)]), ..whole.clone() };
        let ratio = time(&cluster) / even;
        assert!((1.2..most).contains(&ratio), "{change:?}: {ratio}");
    }
    let spine = Cluster { uplink_bytes_per_s: Some(25e9), ..whole };
    let ratio = time(&spine) / even;
    assert!((1.9..2.02).contains(&ratio), "{ratio}");
}

#[test]
fn simulation_is_deterministic() {
    let cluster = Cluster::p5(5);
    let job = &cuts(&cluster, Collective::AllReduce, Algorithm::HierMesh, 5_000_000)[0];
    let (a, b) = (job.run(&cluster, vec![]).unwrap(), job.run(&cluster, vec![3]).unwrap());
    assert_eq!((a.outcome.seconds, &a.outcome.path), (b.outcome.seconds, &b.outcome.path));
    assert!(!b.outcome.bars.is_empty());
}

#[test]
fn invalid_clusters_are_rejected_by_name() {
    let with = |change: fn(&mut Cluster)| {
        let mut cluster = cluster(&[2, 2]);
        change(&mut cluster);
        cluster.check().unwrap_err()
    };
    assert!(with(|c| c.ranks = vec![]).contains("nodes"));
    assert!(with(|c| c.ranks[1] = 0).contains("node 1"));
    assert!(with(|c| c.network.bytes_per_s = 0.0).contains("network.bytes_per_s"));
    assert!(with(|c| c.local.latency_s = f64::NAN).contains("local.latency_us"));
    assert!(with(|c| c.rails = 0).contains("rails"));
    assert!(with(|c| c.incast = 0.9).contains("incast"));
    assert!(with(|c| c.window = 0).contains("window"));
    assert!(with(|c| c.overrides.extend([(2, Override::default())])).contains("node 2"));
    assert_eq!(cluster(&[1, 2]).check(), Ok(()));
}
