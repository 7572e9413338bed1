//! Ranks that get exchanged addresses of their peers: every call gives correct results or raises an error.

use smddp_core::{Collective, Communicator, DType, Options, Result};
use smddp_group::RankInfo;
use smddp_group::joint::{Joined, Prepared, TransportOptions};

use crate::common::{Gate, TIMEOUT, means, over, try_one};

/// Byte range of the group's 16-byte endpoint id in rank information: after the address 127.0.0.1 and the port.
fn endpoint(info: &[u8]) -> std::ops::Range<usize> {
    let address = info.windows(4).position(|bytes| bytes == [127, 0, 0, 1]).unwrap() + 4;
    let port = info[address..].iter().position(|byte| byte & 0x80 == 0).unwrap() + 1;
    address + port..address + port + 16
}

/// The rank information as an attacker passes it to rank `me` of three: the addresses of the other two are exchanged.
fn exchanged(infos: &[RankInfo], me: usize) -> Vec<RankInfo> {
    let mut bytes: Vec<Vec<u8>> = infos.iter().map(RankInfo::to_bytes).collect();
    let [a, b] = [1, 2].map(|step| (me + step) % 3);
    let ranges = [a, b].map(|rank| endpoint(&bytes[rank]));
    let endpoints = [a, b].map(|rank| bytes[rank][endpoint(&bytes[rank])].to_vec());
    bytes[a][ranges[0].clone()].copy_from_slice(&endpoints[1]);
    bytes[b][ranges[1].clone()].copy_from_slice(&endpoints[0]);
    bytes.iter().map(|info| RankInfo::from_bytes(info).unwrap()).collect()
}

/// Three nodes of one rank, each with exchanged addresses of its peers.
fn links(encrypts: bool) -> Vec<Joined> {
    let node = |rank| TransportOptions { encrypts, ..means(Some(format!("node {rank}"))) };
    let prepared: Vec<_> =
        (0..3).map(|rank| Prepared::new(rank, 3, Vec::new(), &node(rank)).unwrap()).collect();
    let infos: Vec<_> = prepared.iter().map(|p| p.rank_info().clone()).collect();
    let each = prepared.into_iter().enumerate();
    each.map(|(rank, p)| p.connect(exchanged(&infos, rank)).unwrap()).collect()
}

/// Runs the call on each rank and asserts that all ranks raise an error with the reason.
fn assert_rejected(encrypts: bool, name: &str, call: impl Fn(&Communicator) -> Result<()> + Sync) {
    let gate = Gate::new(3);
    for (rank, outcome) in over(links(encrypts), TIMEOUT, |comm| {
        // A root may finish before its data has left.
        let outcome = call(comm).and_then(|()| try_one(comm, Collective::Barrier, 0, 0, false));
        gate.wait();
        outcome
    })
    .into_iter()
    .enumerate()
    {
        let text = outcome.expect_err(&format!("{name}, encrypted: {encrypts}, rank {rank}")).to_string();
        assert!(
            text.contains("no connection to 127.0.0.1:"),
            "{name}, encrypted: {encrypts}, rank {rank}: {text}"
        );
    }
}

/// Sends to the next rank and receives from the previous one.
fn message(comm: &Communicator) -> Result<()> {
    let (me, options) = (comm.rank(), Options::default);
    let (data, mut into) = ([me as f32; 8], [f32::NAN; 8]);
    // SAFETY: both buffers live until both operations are complete, or the group has failed.
    let (sent, received) = unsafe {
        (
            comm.send(data.as_ptr().cast(), 8, DType::F32, (me + 1) % 3, 0, options())?,
            comm.recv(into.as_mut_ptr().cast(), 8, DType::F32, Some((me + 2) % 3), 0, options())?,
        )
    };
    let outcomes = [sent.wait(None), received.wait(None)];
    outcomes.into_iter().collect::<Result<Vec<_>>>()?;
    assert_eq!(into, [((me + 2) % 3) as f32; 8]);
    Ok(())
}

#[test]
fn exchanged_addresses_never_deliver_data_of_another_rank() {
    const KINDS: [Collective; 9] = [
        Collective::AllGather,
        Collective::ReduceScatter,
        Collective::AllReduce,
        Collective::Broadcast,
        Collective::Reduce,
        Collective::Gather,
        Collective::Scatter,
        Collective::AllToAll,
        Collective::Barrier,
    ];
    // Concurrently, because a connection without a reply is retried for two seconds.
    std::thread::scope(|scope| {
        for encrypts in [false, true] {
            for kind in KINDS {
                let name = format!("{kind:?}");
                // `try_one` checks each element.
                scope.spawn(move || {
                    assert_rejected(encrypts, &name, |comm| try_one(comm, kind, 1000, 0, false));
                });
            }
            scope.spawn(move || assert_rejected(encrypts, "send and recv", message));
        }
    });
}
