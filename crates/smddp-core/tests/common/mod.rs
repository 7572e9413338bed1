//! Ranks as threads, and the expected results of every collective. Ranks as processes are in `procs`.

pub(crate) mod fake;
pub(crate) mod group;
pub(crate) mod job;
pub(crate) mod procs;

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use fake_libfabric::SimulatedFabric;
use smddp_core::{Blocks, Call, Collective, Communicator, DType, Options, RedOp, Result};
use smddp_fabric::provider_choice;
use smddp_group::joint::{InterNode, Joined, Prepared, TransportOptions, WireScript};
use smddp_net::interface::{AddressFamily, InterfaceFilter};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);
/// Limit for prompt operations on a loaded machine; shorter than every timeout.
pub(crate) const PROMPT_LIMIT: Duration = Duration::from_secs(5);

/// Asserts that one of three runs takes less than `limit`. A loaded machine may delay single runs.
pub(crate) fn takes_less_than(limit: Duration, mut once: impl FnMut() -> Duration) {
    let mut took = Vec::new();
    while took.len() < 3 {
        took.push(once());
        if took.last().is_some_and(|last| *last < limit) {
            return;
        }
    }
    panic!("took {took:?}, expected less than {limit:?}");
}

/// Returns the run time of `body`.
pub(crate) fn timed(body: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    body();
    begun.elapsed()
}

/// Runs `body` on `size` ranks over shared memory and sockets: nodes of `each` ranks, all in this process.
pub(crate) fn node_ranks<T: Send>(
    size: usize,
    each: usize,
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    over(Wire::Nodes(each).links(size), TIMEOUT, body)
}

/// Runs `body` over shared memory: all ranks in this process, each with a separate control block.
pub(crate) fn shm_ranks<T: Send>(size: usize, body: impl Fn(&Communicator) -> T + Sync) -> Vec<T> {
    over(Wire::Shm.links(size), TIMEOUT, body)
}

/// Returns (input elements, output elements) of a rank, for `c` elements per block (whole buffer for all_reduce,
/// broadcast, reduce).
pub(crate) fn shape(
    collective: Collective,
    at_root: bool,
    n: usize,
    c: usize,
) -> (Option<usize>, Option<usize>) {
    match collective {
        Collective::AllGather => (Some(c), Some(n * c)),
        Collective::ReduceScatter => (Some(n * c), Some(c)),
        Collective::AllReduce => (Some(c), Some(c)),
        Collective::Broadcast => (at_root.then_some(c), Some(c)),
        Collective::Reduce => (Some(c), at_root.then_some(c)),
        Collective::Gather => (Some(c), at_root.then_some(n * c)),
        Collective::Scatter => (at_root.then_some(n * c), Some(c)),
        Collective::AllToAll => (Some(n * c), Some(n * c)),
        Collective::Barrier => (None, None),
    }
}

/// Transport between ranks that are threads.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wire {
    Shm,
    /// Shared memory with non-temporal stores to slots, as for readers without a common cache.
    NonTemporal,
    /// Nodes of the given number of ranks: shared memory within a node, sockets between nodes.
    Nodes(usize),
    /// Nodes of the given number of ranks with encrypted sockets between nodes.
    Encrypted(usize),
    /// Nodes of one rank over simulated EFA with this seed, which delays and reorders messages.
    Efa(u64),
    /// Nodes of one rank over sockets. Rank `.0` dies at its message number `.1`.
    Dying(usize, u64),
}

impl Wire {
    /// One wire of each kind.
    pub(crate) const EACH: [Wire; 4] = [Wire::Efa(7), Wire::Shm, Wire::Nodes(1), Wire::Encrypted(2)];

    pub(crate) fn links(self, size: usize) -> Vec<Joined> {
        let node = |rank: usize, each: usize| means(Some(format!("node {}", rank / each)));
        match self {
            Wire::Shm => joined(size, |_| means(None), |_| None),
            Wire::NonTemporal => {
                let mut links = Wire::Shm.links(size);
                links.iter_mut().for_each(Joined::assume_distant_readers);
                links
            }
            Wire::Nodes(each) => joined(size, |rank| node(rank, each), |_| None),
            Wire::Encrypted(each) => {
                joined(size, |rank| TransportOptions { encrypts: true, ..node(rank, each) }, |_| None)
            }
            // A group of one rank has no wire.
            Wire::Efa(_) if size == 1 => Wire::Shm.links(size),
            Wire::Efa(seed) => efa_links(size, 1, &SimulatedFabric::with_small_limits(seed, &[])),
            Wire::Dying(victim, at) => {
                let script = WireScript { death: Some(at), ..WireScript::default() };
                joined(size, |rank| node(rank, 1), |rank| (rank == victim).then(|| script.clone()))
            }
        }
    }
}

pub(crate) fn means(node: Option<String>) -> TransportOptions {
    TransportOptions {
        staging: 64 << 20,
        shm: true,
        node,
        interface: InterfaceFilter { value: Some("=lo".to_owned()), from: "SMDDP_SOCKET_IFNAME" },
        family: AddressFamily::Any,
        peer_timeout: std::time::Duration::from_secs(20),
        inter_node: InterNode::Tcp,
        encrypts: false,
        checksums: false,
        library: None,
        provider: None,
        separate_endpoint: false,
        local: None,
    }
}

/// Nodes of one rank over libfabric's socket provider; `None` if this machine has no libfabric.
pub(crate) fn fabric_links(size: usize) -> Option<Vec<Joined>> {
    let library = std::env::var_os("SMDDP_LIBFABRIC").map(Into::into);
    let provider = Some("tcp;ofi_rxm".to_owned());
    let fabric = |node| TransportOptions {
        inter_node: InterNode::Fabric,
        library: library.clone(),
        provider: provider.clone(),
        ..means(Some(node))
    };
    let settings = provider_choice::Settings {
        library: library.clone(),
        provider: provider.clone(),
        ..Default::default()
    };
    if let Err(reason) = provider_choice::choose_provider(&settings).0 {
        println!("fabric: skipped: {reason}");
        return None;
    }
    Some(joined(size, |rank| fabric(format!("node {rank}")), |_| None))
}

fn joined(
    size: usize,
    means: impl Fn(usize) -> TransportOptions,
    script: impl Fn(usize) -> Option<WireScript>,
) -> Vec<Joined> {
    let mut prepared: Vec<_> =
        (0..size).map(|r| Prepared::new(r, size, Vec::new(), &means(r)).unwrap()).collect();
    for (rank, one) in prepared.iter_mut().enumerate() {
        script(rank).into_iter().for_each(|script| one.set_script(script));
    }
    let infos: Vec<_> = prepared.iter().map(|p| p.rank_info().clone()).collect();
    prepared.into_iter().map(|p| p.connect(infos.clone()).unwrap()).collect()
}

/// Nodes of `each` ranks over a simulated fabric that this thread has just created. Each rank has an endpoint.
pub(crate) fn efa_links(size: usize, each: usize, fabric: &SimulatedFabric) -> Vec<Joined> {
    joined(size, efa_options(each, fabric), |_| None)
}

fn efa_options(each: usize, _fabric: &SimulatedFabric) -> impl Fn(usize) -> TransportOptions {
    move |rank| TransportOptions {
        inter_node: InterNode::Fabric,
        library: Some(fake_libfabric::PATH.into()),
        separate_endpoint: true,
        ..means(Some(format!("node {}", rank / each)))
    }
}

/// Nodes of one rank whose frames have checksums, over TCP or simulated EFA. `corrupting`: a rank, and the number of
/// its message that changes in transit.
pub(crate) fn checked_links(size: usize, efa: bool, corrupting: Option<(usize, u64)>) -> Vec<Joined> {
    let fabric = SimulatedFabric::with_small_limits(7, &[]);
    let over_fabric = efa_options(1, &fabric);
    let options = |rank: usize| match efa {
        true => TransportOptions { checksums: true, ..over_fabric(rank) },
        false => TransportOptions { checksums: true, ..means(Some(format!("node {rank}"))) },
    };
    let script = |corrupts| WireScript { corrupts: Some(corrupts), ..WireScript::default() };
    joined(size, options, |rank| {
        corrupting.filter(|(sender, _)| *sender == rank).map(|(_, number)| script(number))
    })
}

/// Barrier between ranks that are threads, outside the library. Unlike the standard library's barrier it has a
/// timeout, for the case that a rank fails.
pub(crate) struct Gate {
    size: usize,
    state: Mutex<(usize, usize)>,
    changed: Condvar,
}

impl Gate {
    pub(crate) fn new(size: usize) -> Self {
        Self { size, state: Mutex::default(), changed: Condvar::new() }
    }

    pub(crate) fn wait(&self) {
        self.wait_timeout(TIMEOUT);
    }

    pub(crate) fn wait_timeout(&self, timeout: Duration) {
        let mut state = self.state.lock().unwrap();
        state.0 += 1;
        if state.0 == self.size {
            *state = (0, state.1 + 1);
            self.changed.notify_all();
            return;
        }
        let generation = state.1;
        let (_state, out) =
            self.changed.wait_timeout_while(state, timeout, |state| state.1 == generation).unwrap();
        assert!(!out.timed_out(), "a rank did not reach the gate");
    }
}

pub(crate) fn over<T: Send>(
    links: Vec<Joined>,
    timeout: Duration,
    body: impl Fn(&Communicator) -> T + Sync,
) -> Vec<T> {
    std::thread::scope(|scope| {
        let handles: Vec<_> = links
            .into_iter()
            .map(|Joined { group: link, nodes, .. }| {
                let body = &body;
                scope.spawn(move || body(&Communicator::from_group(link, &nodes, "test", timeout)))
            })
            .collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

/// Input element `i` of rank `r`: a small integer, exact in every sum.
pub(crate) fn value(r: usize, i: usize) -> f32 {
    ((i * 7 + r * 13) % 31) as f32
}

fn flat(data: &mut [f32]) -> Blocks<'static> {
    Blocks::Flat { ptr: data.as_mut_ptr().cast(), count: data.len() }
}

/// Runs `collective` with `count` elements per block (whole buffer for all_reduce, broadcast, reduce) and checks
/// every element.
pub(crate) fn try_one(
    comm: &Communicator,
    collective: Collective,
    count: usize,
    root: usize,
    in_place: bool,
) -> Result<()> {
    let (me, n) = (comm.rank(), comm.size());
    let data = |r: usize, len: usize| (0..len).map(|i| value(r, i)).collect::<Vec<f32>>();
    let sum = |i: usize| (0..n).map(|r| value(r, i)).sum::<f32>();
    let nan = |len: usize| vec![f32::NAN; len];
    let at_root = me == root;
    let mut input = Vec::new();
    let mut output = Vec::new();
    let want: Vec<f32>;
    match collective {
        Collective::AllGather => {
            input = data(me, count);
            output = nan(n * count);
            want = (0..n).flat_map(|r| data(r, count)).collect();
        }
        Collective::ReduceScatter => {
            input = data(me, n * count);
            output = nan(count);
            want = (0..count).map(|i| sum(me * count + i)).collect();
        }
        Collective::AllReduce => {
            input = data(me, count);
            output = nan(count);
            want = (0..count).map(sum).collect();
        }
        Collective::Broadcast => {
            if at_root {
                input = data(root, count);
            }
            output = nan(count);
            want = data(root, count);
        }
        Collective::Reduce => {
            input = data(me, count);
            if at_root {
                output = nan(count);
                want = (0..count).map(sum).collect();
            } else {
                want = Vec::new();
            }
        }
        Collective::Gather => {
            input = data(me, count);
            if at_root {
                output = nan(n * count);
                want = (0..n).flat_map(|r| data(r, count)).collect();
            } else {
                want = Vec::new();
            }
        }
        Collective::Scatter => {
            if at_root {
                input = data(root, n * count);
            }
            output = nan(count);
            want = (0..count).map(|i| value(root, me * count + i)).collect();
        }
        Collective::AllToAll => {
            input = data(me, n * count);
            output = nan(n * count);
            want = (0..n).flat_map(|r| (0..count).map(move |i| value(r, me * count + i))).collect();
        }
        Collective::Barrier => want = Vec::new(),
    }
    let can = matches!(collective, Collective::AllReduce | Collective::Broadcast | Collective::Reduce);
    if in_place && can && !input.is_empty() && !output.is_empty() {
        output.copy_from_slice(&input);
        let place = flat(&mut output);
        run(comm, collective, root, place, place)?;
        assert_eq!(output, want, "{collective:?} in place, rank {me} of {n}, {count}");
        return Ok(());
    }
    let none = |data: &mut Vec<f32>, absent: bool| if absent { Blocks::None } else { flat(data) };
    let no_input = collective == Collective::Barrier
        || !at_root && matches!(collective, Collective::Broadcast | Collective::Scatter);
    let no_output = collective == Collective::Barrier
        || !at_root && matches!(collective, Collective::Reduce | Collective::Gather);
    let given = none(&mut input, no_input);
    let taken = none(&mut output, no_output);
    run(comm, collective, root, given, taken)?;
    assert_eq!(output, want, "{collective:?}, rank {me} of {n}, {count} elements, root {root}");
    Ok(())
}

fn run(
    comm: &Communicator,
    collective: Collective,
    root: usize,
    input: Blocks<'_>,
    output: Blocks<'_>,
) -> Result<()> {
    let call = Call { collective, dtype: DType::F32, redop: RedOp::Sum, root, input, output };
    // SAFETY: the vectors outlive the synchronous call.
    unsafe { comm.run(&call, Options::default()) }
}

pub(crate) const ALL: [Collective; 9] = Collective::ALL;
