//! All ranks of a group come to the same way for its devices: once, at the first call on them.

use std::sync::Arc;

use smddp_cuda::{Address, Uuid};
use smddp_plan::Collective;
use smddp_transport::Board;

use super::regions::Sample;
use super::site::{LEAST_SLAB, Lobby, Site};
use super::words::{Pages, Words};
use super::{MOST_SITES, On, Place, Way};
use crate::call::{Blocks, Call};
use crate::comm::{Communicator, Options};
use crate::config::{DevicePath, Level};
use crate::error::{Error, Result};
use crate::log;
use crate::types::{DType, RedOp};

/// What a rank says of its device: its name for itself, and the number of a sample of its memory.
const CARD: usize = 24;
/// What it says of the way: a byte, then why not by reference.
const VERDICT: usize = 256;
const REFERENCE: u8 = 1;
const HOST: u8 = 0;
const NOT_AT_ALL: u8 = 2;

fn refused(what: &str, error: &smddp_cuda::Error) -> Error {
    Error::System { what: what.to_owned(), why: error.to_string() }
}

/// Gathers `mine` of all ranks, over the host.
fn gather(comm: &Communicator, mine: &[u8]) -> Result<Vec<u8>> {
    let mut all = vec![0; mine.len() * comm.size()];
    let call = Call {
        collective: Collective::AllGather,
        dtype: DType::U8,
        redop: RedOp::Sum,
        root: 0,
        input: Blocks::Flat { ptr: mine.as_ptr().cast_mut(), count: mine.len() },
        output: Blocks::Flat { ptr: all.as_mut_ptr(), count: all.len() },
    };
    // SAFETY: both buffers outlive the call, which is synchronous; the input is only read.
    unsafe { comm.run(&call, Options::default()) }?;
    Ok(all)
}

/// Makes the group's site number `index` on a device. All ranks do so at the same call. `first`: the group's first, if this
/// is another one.
pub(crate) fn agree(
    comm: &Communicator,
    on: &On,
    index: usize,
    first: Option<&Arc<Lobby>>,
    board: Option<Arc<Board>>,
) -> Result<(Arc<Lobby>, Site)> {
    let (rank, size, device) = (comm.rank(), comm.size(), &on.device);
    if index >= MOST_SITES {
        return Err(Error::Invalid(format!(
            "group `{}` has used {MOST_SITES} devices already; make another group for this one",
            comm.name()
        )));
    }
    let failed = |error| refused(&format!("group `{}` on {}", comm.name(), device.describe()), &error);
    // Loaded later, at first use, a kernel may wait for streams that wait for other ranks.
    let unable = device.no_words().or(device.prepare().err().map(|error| format!("its kernels: {error}")));
    let (way, path, pages, sample) = if size == 1 {
        if let Some(why) = unable {
            return Err(impossible(comm, &format!("rank 0: {why}")));
        }
        (Way::Reference, "one rank: a copy at most".to_owned(), None, None)
    } else {
        let known = first.and_then(|lobby| lobby.words.pages());
        meet(comm, on, known, board.clone(), unable)?
    };
    if way == Way::Host && comm.config().device_path == DevicePath::Reference {
        return Err(Error::Topology(format!(
            "group `{}`: SMDDP_CUDA_PATH=ipc, and device memory would go {path}",
            comm.name()
        )));
    }
    log::say(
        Level::Info,
        &format!("group `{}`: rank {rank} on {}: within the node {path}", comm.name(), device.describe()),
    );
    let words = Words::new(device.clone(), pages, (rank, size), index).map_err(failed)?;
    let (place, ahead) = (Place { site: index, way }, comm.config().cuda_ahead);
    let lobby = Lobby::new(device.clone(), place, path, words, ahead).map_err(failed)?;
    let site = Site::new(lobby.clone(), board.filter(|_| way == Way::Reference && size > 1), size, sample);
    Ok((lobby, site))
}

/// A way, in words too, and what it needs: the node's pages, and memory that was allocated to find out.
type Found = (Way, String, Option<Arc<Pages>>, Option<Address>);

/// All ranks say what their devices can do, and come to the same.
fn meet(
    comm: &Communicator,
    on: &On,
    known: Option<Arc<Pages>>,
    board: Option<Arc<Board>>,
    unable: Option<String>,
) -> Result<Found> {
    let device = &on.device;
    let asked = match (&board, comm.config().device_path) {
        (_, DevicePath::Host) => Err("SMDDP_CUDA_PATH=host".to_owned()),
        (None, _) => Err("its link shares no memory with the ranks of its node".to_owned()),
        (Some(_), _) if unable.is_some() => Err(String::new()),
        (Some(board), _) => Sample::new(device, board, LEAST_SLAB).map_err(|error| error.to_string()),
    };
    let mut card = device.uuid().to_vec();
    card.extend(asked.as_ref().map_or(0, |sample| sample.token).to_le_bytes());
    let cards = gather(comm, &card)?;
    let found = asked.as_ref().map_err(Clone::clone).and_then(|_| {
        let board = board.clone().ok_or_else(String::new)?;
        reach(comm, on, &cards, &board)?;
        match known {
            Some(pages) => Ok(pages),
            None => Pages::new(device.clone(), board, comm.size())
                .map(Arc::new)
                .map_err(|error| format!("its words cannot be made known to the device: {error}")),
        }
    });
    let (kind, why) = match (&unable, &found) {
        (Some(why), _) => (NOT_AT_ALL, why.clone()),
        (None, Ok(_)) => (REFERENCE, String::new()),
        (None, Err(why)) => (HOST, why.clone()),
    };
    let mut verdict = vec![kind];
    verdict.extend(why.bytes().take(VERDICT - 1));
    verdict.resize(VERDICT, 0);
    let verdicts = gather(comm, &verdict)?;
    if let (Some(board), Ok(sample)) = (&board, &asked) {
        // All have tried it.
        board.withdraw(sample.token);
    }
    let first = |kind: u8| {
        let rank = verdicts.chunks_exact(VERDICT).position(|verdict| verdict[0] == kind)?;
        let text = String::from_utf8_lossy(&verdicts[rank * VERDICT + 1..(rank + 1) * VERDICT]);
        Some(format!("rank {rank}: {}", text.trim_end_matches('\0')))
    };
    let memory = asked.ok().map(|sample| sample.at);
    if let Some(why) = first(NOT_AT_ALL) {
        if let Some(at) = memory {
            // SAFETY: allocated for this, and nobody has it any more: all ranks have given their verdict.
            unsafe { device.free(at) };
        }
        return Err(impossible(comm, &why));
    }
    Ok(match first(HOST) {
        None => {
            let path = "by reference: copy engines read the peers' memory".to_owned();
            (Way::Reference, path, found.ok(), memory)
        }
        Some(why) => (Way::Host, format!("through pinned host memory ({why})"), None, memory),
    })
}

fn impossible(comm: &Communicator, why: &str) -> Error {
    Error::Topology(format!(
        "group `{}`: smddp cannot move device memory here ({why}); give its CUDA tensors to another backend, as in \
         init_process_group('cpu:smddp,cuda:nccl')",
        comm.name()
    ))
}

/// Whether this rank's device has the memory of its node's devices: tried with a sample of each.
fn reach(comm: &Communicator, on: &On, cards: &[u8], board: &Arc<Board>) -> Result<(), String> {
    let topology = comm.topology();
    for mate in (0..comm.size()).filter(|&mate| topology.share_node(mate, comm.rank())) {
        let card = &cards[mate * CARD..(mate + 1) * CARD];
        let (mut uuid, mut token) = (Uuid::default(), [0; 8]);
        uuid.copy_from_slice(&card[..16]);
        token.copy_from_slice(&card[16..]);
        if mate == comm.rank() {
            continue;
        }
        if !on.device.reaches(&uuid) {
            return Err(format!("{} does not reach the device of rank {mate}", on.device.describe()));
        }
        Sample::try_of(&on.device, board, mate, u64::from_le_bytes(token))?;
    }
    Ok(())
}
