//! Creation of a group's local half: allocation of this rank's control block, then connection to the ranks of its node.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::channels::LocalChannels;
use super::local_ranks::{GroupHome, LocalRank, LocalRanks};
use crate::RankInfo;
use crate::process::layout::*;
use crate::process::peer::PeerProcess;
use crate::process::{Endpoint, ProcessAddress, random};
use crate::token::Token;

/// Local half of a group before the exchange of rank information.
pub struct Prepared {
    /// `None` for a group of one rank.
    home: Option<GroupHome>,
    rank_info: RankInfo,
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
    pub fn new(
        rank: usize,
        size: usize,
        staging_cap: usize,
        settings: Vec<(String, String)>,
    ) -> io::Result<Self> {
        if size <= 1 {
            let rank_info = RankInfo::new(rank, size, settings, ProcessAddress::default(), (0, 0));
            return Ok(Self { home: None, rank_info });
        }
        let endpoint = Endpoint::get(staging_cap)?;
        let block = endpoint.control.take(&endpoint.memory, block_bytes(size)).ok_or_else(|| {
            io::Error::other("the control blocks of the live groups fill 256 MiB: destroy some groups")
        })?;
        // Unique among the control blocks of all processes.
        let nonce = u64::from_le_bytes(random()) | 1;
        // Release: this nonce shows other processes that the block's previous group has ended here. They may then assume that this
        // process has finished its reads in that group.
        endpoint.memory.flag64(block + NONCE).store(nonce, Ordering::Release);
        endpoint.memory.flag32(block + STATE).store(OPEN, Ordering::Release);
        let mut rank_info =
            RankInfo::new(rank, size, settings, endpoint.address.clone(), (block as u64, nonce));
        if rank == 0 {
            rank_info.token = Some(Token::random()?);
        }
        Ok(Self { home: Some(GroupHome { endpoint, block, nonce, size, token: None }), rank_info })
    }

    /// Makes this process accept connections authenticated by that token.
    pub(crate) fn trust(&mut self, token: &Arc<Token>) {
        if let Some(home) = &mut self.home {
            home.endpoint.tokens.add(token);
            home.token = Some(token.clone());
        }
    }

    /// Trusts the token in rank 0's information, which must have travelled through a confidential channel. Other ranks' information
    /// has no token and changes nothing.
    pub fn trust_rank_info(&mut self, first: &RankInfo) {
        if let Some(token) = &first.token {
            self.trust(&Arc::new(token.clone()));
        }
    }

    /// Returns this rank's information, which the other ranks need for [`Self::connect`].
    pub fn rank_info(&self) -> &RankInfo {
        &self.rank_info
    }

    pub(crate) fn rank_info_mut(&mut self) -> &mut RankInfo {
        &mut self.rank_info
    }

    /// Maps the memory of the ranks of this node. `rank_infos`: their information including this rank's, ascending. The index in
    /// this list is the rank's number in [`LocalChannels`].
    pub fn connect(mut self, rank_infos: Vec<RankInfo>) -> Result<LocalChannels, Unreachable> {
        if self.home.as_ref().is_some_and(|home| home.token.is_none()) {
            rank_infos.iter().for_each(|rank_info| self.trust_rank_info(rank_info));
        }
        let me = rank_infos.iter().position(|rank_info| rank_info.rank == self.rank_info.rank).unwrap_or(0);
        let Some(GroupHome { endpoint, token, .. }) = &self.home else {
            return Ok(LocalChannels::new(self.home, LocalRanks { peers: Vec::new(), me }));
        };
        let mut peers = Vec::with_capacity(rank_infos.len());
        for rank_info in rank_infos {
            // Ranks that are threads of this process need no mapping.
            let process = if rank_info.process.id == endpoint.address.id {
                None
            } else {
                Some(connect_process(endpoint, token.as_ref(), &self.rank_info, &rank_info)?)
            };
            let (doorbell, block) =
                (endpoint.doorbell(), usize::try_from(rank_info.block).unwrap_or(usize::MAX));
            let peer = LocalRank { process, doorbell, block, nonce: rank_info.nonce, rank_info };
            // Later reads of the block have no bounds check.
            if !peer.memory().contains(block, block_bytes(self.rank_info.size as usize)) {
                let RankInfo { rank, host, pid, .. } = peer.rank_info;
                let reason = format!(
                    "its rank information has a control block at offset {block}, outside of its memory"
                );
                return Err(Unreachable { rank: rank as usize, host, pid, ended: false, reason });
            }
            peers.push(peer);
        }
        endpoint.deaths.refresh();
        Ok(LocalChannels::new(self.home, LocalRanks { peers, me }))
    }
}

fn connect_process(
    endpoint: &Endpoint,
    token: Option<&Arc<Token>>,
    mine: &RankInfo,
    rank_info: &RankInfo,
) -> Result<Arc<PeerProcess>, Unreachable> {
    let fail = |reason: String| {
        let RankInfo { rank, host, pid, .. } = rank_info;
        Unreachable { rank: *rank as usize, host: host.clone(), pid: *pid, ended: false, reason }
    };
    if rank_info.boot != mine.boot {
        return Err(fail(format!("it runs on another host ({} here, {} there)", mine.host, rank_info.host)));
    }
    let Some(token) = token else {
        return Err(fail("this rank has not received the group's token".to_owned()));
    };
    endpoint.open_peer(&rank_info.process, token).map_err(|error| {
        // The rank proved in the bootstrap that it has the token, so it does not reject a connection with that token.
        let ended = matches!(
            error.kind(),
            ErrorKind::ConnectionRefused
                | ErrorKind::ConnectionReset
                | ErrorKind::BrokenPipe
                | ErrorKind::UnexpectedEof
        );
        let same_domain = (rank_info.netns, rank_info.uid) == (mine.netns, mine.uid);
        let ended = ended && same_domain;
        // A limit of this process: the other process is healthy.
        let reason = if error.kind() == ErrorKind::OutOfMemory {
            format!("{error}; or set SMDDP_NODE=%r for all ranks to go over the network")
        } else if rank_info.netns != mine.netns {
            format!("its network namespace differs, so its unix socket is out of reach ({error})")
        } else if rank_info.uid != mine.uid {
            format!("it runs as user {}, this process as user {} ({error})", rank_info.uid, mine.uid)
        } else if ended {
            format!("its unix socket is closed ({error})")
        } else {
            format!("its unix socket fails ({error}). Its log names the reason; SMDDP_NODE=%r uses the network instead")
        };
        Unreachable { ended, ..fail(reason) }
    })
}
