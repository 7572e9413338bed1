//! Tests of frames over a simulated fabric with many seeds, and of each of its rules.

use fake_libfabric::{Rule, SimulatedFabric, knob};
use smddp_net::wire::{Broken, Wire};

use super::exchange::Run;
use super::open;
use super::simulated::{Memory, choose};
use crate::endpoint::ProtocolError;
use crate::rail::{Completion, LocalMemory, Posted, Rail as _};

const MAX_ROUNDS: usize = 200_000;

/// Number of seeds: `EFA_SEEDS`, or 30.
fn seeds() -> u64 {
    std::env::var("EFA_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(30)
}

#[test]
fn all_frames_arrive_complete_and_in_order_for_every_seed() {
    for seed in 0..seeds() {
        for rails in [1, 2, 4] {
            let knobs = [
                (knob::DEVICES, rails),
                (knob::EMULATED_WRITE, (seed + 1) % 2),
                (knob::DATA_CONSUMES_BUFFER, u64::from(seed % 4 == 1)),
                (knob::ONE_SIDED, [1 << 20, 20_000, 4096][seed as usize % 3]),
            ];
            let size = 2 + seed as usize % 3;
            let mut run = Run::new(size, SimulatedFabric::with_small_limits(seed, &knobs), seed, 24, None);
            if let Err(reason) = run.run(24, MAX_ROUNDS) {
                let violations = run.fabric.violations();
                panic!("seed {seed}, {rails} rails, {size} ranks: {reason}; {violations:?}");
            }
            assert_eq!(run.fabric.violations(), [], "seed {seed}, {rails} rails");
        }
    }
}

/// Runs an endpoint that breaks a rule, with the rule switched on and off.
fn check_rule(error: ProtocolError, rule: Rule, knobs: &[(u64, u64)], without: &[Rule]) {
    let run = |seed, without: &[Rule], rounds| {
        let fabric = SimulatedFabric::with_small_limits(seed, knobs);
        fabric.set_without(without);
        let mut run = Run::new(2, fabric, seed, 24, Some(error));
        run.one_way(error);
        let result = run.run(24, rounds);
        (result, run.fabric.violations())
    };
    // The fabric does not detect errors of order and counting: the received data are wrong.
    let is_detected = |result: &Result<(), String>, violations: &[Rule]| match rule {
        Rule::Order => result.is_err() && violations.is_empty(),
        _ => violations == [rule],
    };
    let detected =
        (0..20).map(|seed| run(seed, without, 5_000)).find(|(result, found)| is_detected(result, found));
    let Some((result, _)) = detected else { panic!("{error:?} is not detected") };
    println!("{error:?}: {result:?}");
    if error == ProtocolError::Counting {
        return;
    }
    for seed in 0..3 {
        assert_eq!(run(seed, &[rule], MAX_ROUNDS), (Ok(()), vec![]), "{error:?} fails without {rule:?}");
    }
}

#[test]
fn each_rule_detects_its_violation_only() {
    check_rule(ProtocolError::Desc, Rule::Descriptor, &[], &[]);
    check_rule(ProtocolError::Key, Rule::Key, &[], &[]);
    check_rule(ProtocolError::Address, Rule::Address, &[], &[]);
    check_rule(ProtocolError::Size, Rule::Message, &[], &[]);
    check_rule(ProtocolError::Cap, Rule::OneSided, &[(knob::ONE_SIDED, 65_536)], &[]);
    check_rule(ProtocolError::Order, Rule::Order, &[], &[]);
    check_rule(ProtocolError::Window, Rule::Receive, &[(knob::RECEIVES, 8)], &[]);
    check_rule(ProtocolError::Again, Rule::Again, &[], &[]);
    check_rule(ProtocolError::Writes, Rule::Writes, &[], &[]);
    let writes = [(knob::EMULATED_WRITE, 0), (knob::ONE_SIDED, 4096)];
    check_rule(ProtocolError::Counting, Rule::Order, &writes, &[]);
    check_rule(ProtocolError::AddressVector, Rule::AddressVector, &[(knob::DEVICES, 2)], &[]);
    let queues = [(knob::ONE_SIDED, 4096), (knob::OPERATIONS, 512), (knob::COMPLETIONS, 48)];
    // Queues that are never full at random, for the maximum number of operations in flight.
    check_rule(ProtocolError::Completions, Rule::Completions, &queues, &[Rule::Again]);
}

#[test]
fn queues_do_not_overrun_at_a_rank_that_polls_rarely() {
    for seed in 0..5 {
        let knobs = [
            (knob::ONE_SIDED, [4096, 1 << 20][seed as usize % 2]),
            (knob::OPERATIONS, 512),
            (knob::COMPLETIONS, 64),
            (knob::EMULATED_WRITE, (seed + 1) % 2),
            (knob::DATA_CONSUMES_BUFFER, u64::from(seed % 4 == 1)),
        ];
        let mut run = Run::new(3, SimulatedFabric::with_small_limits(seed, &knobs), seed, 24, None);
        run.pause = 100;
        let result = run.run(24, MAX_ROUNDS);
        assert_eq!((result, run.fabric.violations()), (Ok(()), vec![]), "seed {seed}");
    }
}

#[test]
fn closed_endpoint_is_reported_to_its_peers() {
    for seed in 0..10 {
        let mut run = Run::new(3, SimulatedFabric::with_small_limits(seed, &[]), seed, 40, None);
        for _ in 0..20 {
            (0..3).for_each(|rank| {
                run.step(rank);
            });
        }
        // Closes its devices, as the end of its process would.
        drop(run.ranks.pop());
        for _ in 0..MAX_ROUNDS {
            (0..2).for_each(|rank| {
                run.step(rank);
            });
            let mut is_reported =
                |rank: usize| Broken::among(run.ranks[rank].wire.peers()).iter().any(|b| b.peer == 2);
            if is_reported(0) && is_reported(1) {
                break;
            }
        }
        for rank in 0..2 {
            let broken = Broken::among(run.ranks[rank].wire.peers());
            assert_eq!(broken.len(), 1, "{broken:?}");
            assert!(broken[0].peer == 2 && broken[0].reason.contains("Input/output error"), "{broken:?}");
        }
    }
}

/// Returns the events of two endpoints while one sends messages to the other.
fn events(seed: u64) -> Vec<Completion> {
    const MESSAGES: u64 = 20;
    let (_fabric, memory) =
        (SimulatedFabric::with_small_limits(seed, &[]), Memory::new(2 * MESSAGES as usize));
    let choice = choose(None, None);
    let mut rails = [(); 2].map(|()| open(&choice).unwrap().1.remove(0));
    // SAFETY: `memory` outlives the rails, and only these operations use it.
    let descs = rails.each_mut().map(|rail| unsafe { rail.register(memory.at(0), 40) }.unwrap().desc);
    let local = |rank: usize, at| LocalMemory { at: memory.at(at as usize), bytes: 1, desc: descs[rank] };
    let to = rails[1].address();
    let to = rails[0].insert(&to).unwrap();
    let mut events = Vec::new();
    for context in 0..MESSAGES {
        // SAFETY: as above.
        unsafe { rails[1].receive(local(1, context), context) }.unwrap();
    }
    for context in MESSAGES..2 * MESSAGES {
        // SAFETY: as above.
        while unsafe { rails[0].send(to, local(0, context), context) } == Ok(Posted::QueueFull) {
            rails[0].poll(&mut events);
        }
    }
    while events.len() < 2 * MESSAGES as usize {
        rails.iter_mut().for_each(|rail| rail.poll(&mut events));
    }
    events
}

#[test]
fn equal_seeds_give_equal_events() {
    for seed in 0..10 {
        assert_eq!(events(seed), events(seed), "seed {seed}");
        assert_ne!(events(seed), events(seed + 1), "seed {seed}");
    }
}
