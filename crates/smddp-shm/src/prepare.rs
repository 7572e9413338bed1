//! Creation of a group's local half: allocation of this rank's control block, then connection to the ranks of its node.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smddp_base::random::bytes as random;
use smddp_net::token::Token;
use smddp_process::ControlBlock;
use smddp_process::layout::*;
use smddp_process::peer::PeerProcess;
pub(crate) use smddp_process::{Endpoint, ProcessAddress};

use super::channels::LocalChannels;
use super::local_ranks::{GroupHome, LocalRank, LocalRanks};
use super::rank_address::RankAddress;

/// Local half of a group before the exchange of addresses.
pub struct Prepared {
    /// `None` for a group of one rank.
    home: Option<GroupHome>,
    /// Control block of `home`.
    block: Option<ControlBlock>,
    address: RankAddress,
}

/// A rank that cannot be reached through shared memory.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank} ({host}, pid {pid}) cannot share memory with this process: {reason}")]
pub struct Unreachable {
    /// Rank in the group.
    pub rank: usize,
    /// Name of its host.
    pub host: String,
    /// Its process id.
    pub pid: u32,
    /// Set if its process has ended or closed its endpoint.
    pub ended: bool,
    /// Reason, for error messages.
    pub reason: String,
}

impl Prepared {
    /// Allocates a control block, except for a group of one rank. `staging_cap`: bytes of the staging pool.
    ///
    /// # Errors
    /// The process cannot create its shared memory, or that memory has no room for the control block.
    pub fn new(rank: usize, size: usize, staging_cap: usize) -> io::Result<Self> {
        if size <= 1 {
            let address = RankAddress::new((rank, size), ProcessAddress::default(), (0, 0));
            return Ok(Self { home: None, block: None, address });
        }
        let endpoint = Endpoint::get(staging_cap)?;
        let control_block = endpoint.control.take(&endpoint.memory, block_bytes(size)).ok_or_else(|| {
            io::Error::other("the control blocks of the live groups fill 256 MiB: destroy some groups")
        })?;
        let block = control_block.offset();
        // Unique among the control blocks of all processes.
        let nonce = u64::from_le_bytes(random()) | 1;
        // Release: this nonce shows other processes that the block's previous group has ended here. They may then assume that this
        // process has finished its reads in that group.
        endpoint.memory.flag64(block + NONCE).store(nonce, Ordering::Release);
        endpoint.memory.flag32(block + STATE).store(OPEN, Ordering::Release);
        let address = RankAddress::new((rank, size), endpoint.address().clone(), (block as u64, nonce));
        let home = GroupHome { endpoint, block, nonce, size, token: None };
        Ok(Self { home: Some(home), block: Some(control_block), address })
    }

    /// Makes this process accept connections authenticated by that token.
    pub fn trust(&mut self, token: &Arc<Token>) {
        if let Some(home) = &mut self.home {
            home.endpoint.trust(token);
            home.token = Some(token.clone());
        }
    }

    /// Returns this rank's address, which the other ranks need for [`Self::connect`].
    pub fn address(&self) -> &RankAddress {
        &self.address
    }

    /// Maps the memory of the ranks of this node. `addresses`: their addresses including this rank's, ascending. The index in this
    /// list is the rank's number in [`LocalChannels`]. Ranks of other processes need the token first ([`Self::trust`]).
    ///
    /// # Errors
    /// - A rank runs on another host, in another network namespace, as another user, or with another version.
    /// - The process of a rank has ended or closed its endpoint.
    /// - The address of a rank has a control block outside of its memory.
    /// - This rank has not received the group's token ([`Self::trust`]), and a rank is in another process.
    /// - This process has no address space or no descriptor for the memory of a rank.
    pub fn connect(self, addresses: Vec<RankAddress>) -> Result<LocalChannels, Unreachable> {
        let me = addresses.iter().position(|address| address.rank == self.address.rank).unwrap_or(0);
        let Some(GroupHome { endpoint, token, .. }) = &self.home else {
            return Ok(LocalChannels::new(self.home, self.block, LocalRanks { peers: Vec::new(), me }));
        };
        let mut peers = Vec::with_capacity(addresses.len());
        for address in addresses {
            // Ranks that are threads of this process need no mapping.
            let process = if address.process.id == endpoint.address().id {
                None
            } else {
                Some(connect_process(endpoint, token.as_ref(), &self.address, &address)?)
            };
            let (doorbell, block) =
                (endpoint.doorbell(), usize::try_from(address.block).unwrap_or(usize::MAX));
            let peer = LocalRank { process, doorbell, block, nonce: address.nonce, address };
            // Later reads of the block have no bounds check.
            if !peer.memory().contains(block, block_bytes(self.address.size as usize)) {
                let RankAddress { rank, host, pid, .. } = peer.address;
                let reason =
                    format!("its address has a control block at offset {block}, outside of its memory");
                return Err(Unreachable { rank: rank as usize, host, pid, ended: false, reason });
            }
            peers.push(peer);
        }
        endpoint.watch_peers();
        Ok(LocalChannels::new(self.home, self.block, LocalRanks { peers, me }))
    }
}

fn connect_process(
    endpoint: &Endpoint,
    token: Option<&Arc<Token>>,
    mine: &RankAddress,
    address: &RankAddress,
) -> Result<Arc<PeerProcess>, Unreachable> {
    let fail = |reason: String| {
        let RankAddress { rank, host, pid, .. } = address;
        Unreachable { rank: *rank as usize, host: host.clone(), pid: *pid, ended: false, reason }
    };
    if address.boot != mine.boot {
        return Err(fail(format!("it runs on another host ({} here, {} there)", mine.host, address.host)));
    }
    let Some(token) = token else {
        return Err(fail("this rank has not received the group's token".to_owned()));
    };
    endpoint.open_peer(&address.process, token).map_err(|error| {
        // The rank proved in the bootstrap that it has the token, so it does not reject a connection with that token.
        let ended = matches!(
            error.kind(),
            ErrorKind::ConnectionRefused
                | ErrorKind::ConnectionReset
                | ErrorKind::BrokenPipe
                | ErrorKind::UnexpectedEof
        );
        let same_domain = (address.netns, address.uid) == (mine.netns, mine.uid);
        let ended = ended && same_domain;
        // A limit of this process: the other process is healthy.
        let reason = if error.kind() == ErrorKind::OutOfMemory {
            format!("{error}; or set SMDDP_NODE=%r for all ranks to go over the network")
        } else if address.netns != mine.netns {
            format!("its network namespace differs, so its unix socket is out of reach ({error})")
        } else if address.uid != mine.uid {
            format!("it runs as user {}, this process as user {} ({error})", address.uid, mine.uid)
        } else if ended {
            format!("its unix socket is closed ({error})")
        } else {
            format!("its unix socket fails ({error}). Its log names the reason; SMDDP_NODE=%r uses the network instead")
        };
        Unreachable { ended, ..fail(reason) }
    })
}
