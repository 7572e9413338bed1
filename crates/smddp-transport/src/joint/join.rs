//! Making a group: what this rank offers, and, with what all others offer, who is reached how.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use super::group::Group;
use super::options::{InterNode, TransportOptions};
use super::routes::Routes;
use super::scripted::{Scripted, WireScript};
use super::transports::LocalTransports;
use crate::RankInfo;
use crate::bootstrap::RankTree;
use crate::net::channels::{RemoteChannels, RemoteParts};
use crate::process::Endpoint;
use crate::shm::{self, Unreachable};
use crate::token::Token;

/// Why there is no group.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    #[error("{0}")]
    Nodes(String),
}

/// A group, and each rank's node.
pub struct Joined {
    pub group: Group,
    pub nodes: Vec<usize>,
    /// Ranks of this host, whether or not they share memory: they share its cores.
    pub local_ranks: usize,
    /// What there is between nodes, and why it is used or not.
    pub told: Vec<String>,
}

/// Keeps this process's endpoint open to the other ranks of a group.
///
/// A rank that fails in `init` holds it until its error is in the store: a closed socket looks like the end of the process.
pub struct OpenEndpoint {
    _endpoint: Option<Arc<Endpoint>>,
    _token: Option<Arc<Token>>,
}

/// First half of making a group: nobody waits.
pub struct Prepared {
    shm: shm::Prepared,
    ends: LocalTransports,
    options: TransportOptions,
    script: Option<WireScript>,
    /// Of the job's own, beside what the group's store knows.
    secret: Option<Vec<u8>>,
    token: Option<Arc<Token>>,
}

impl Prepared {
    pub fn new(
        rank: usize,
        size: usize,
        settings: Vec<(String, String)>,
        options: &TransportOptions,
    ) -> io::Result<Self> {
        // Made before `shm::Prepared` asks for it without the number of ranks.
        let here = options.local.map_or(size, |(_, ranks)| ranks.min(size));
        let endpoint = (size > 1)
            .then(|| Endpoint::with_local_ranks(options.staging, if options.shm { here } else { 1 }))
            .transpose()?;
        let mut shm = shm::Prepared::new(rank, size, options.staging, settings)?;
        let mut ends = LocalTransports::default();
        if let Some(endpoint) = endpoint {
            let alone = (!options.shm || !endpoint.is_shared()).then(|| format!("rank {rank}"));
            shm.rank_info_mut().node = alone.or_else(|| options.node.clone()).unwrap_or_default();
            (ends, shm.rank_info_mut().offer) = LocalTransports::open(&endpoint, rank, size, options);
        }
        Ok(Self { shm, ends, options: options.clone(), script: None, secret: None, token: None })
    }

    pub fn rank_info(&self) -> &RankInfo {
        self.shm.rank_info()
    }

    /// Keeps the endpoint open after [`Prepared::connect`] has failed.
    pub fn open_endpoint(&self) -> OpenEndpoint {
        OpenEndpoint { _endpoint: Endpoint::existing(), _token: self.token.clone() }
    }

    /// Puts a word of the caller's own on the card.
    pub fn set_note(&mut self, note: Vec<u8>) {
        self.shm.rank_info_mut().note = note;
    }

    /// Has the wire to other nodes do what a test says.
    pub fn set_script(&mut self, script: WireScript) {
        self.script = Some(script);
    }

    /// This rank's part of the tree along which cards travel.
    pub fn tree(&mut self) -> io::Result<RankTree> {
        let shared = self.rank_info().token.clone();
        let token = shared.map(|shared| self.trust(&shared));
        RankTree::new(self.rank_info(), token, self.secret.as_deref())
    }

    /// Has it call its parent: `first` is rank 0's address in the tree, `parent` the parent's. Whether that is a new one; an
    /// error says what is wrong with which of them.
    pub fn call_parent(
        &mut self,
        tree: &mut RankTree,
        first: &[u8],
        parent: &[u8],
        now: Instant,
    ) -> Result<bool, String> {
        let shared = tree.shared(first).map_err(|reason| format!("rank 0 has {reason}"))?;
        let token = self.trust(&shared);
        tree.call(token, parent, now)
            .map_err(|reason| format!("rank {} has {reason}", tree.parent().unwrap_or(0)))
    }

    /// Only ranks with the same secret come into a group: before anything else.
    pub fn set_secret(&mut self, secret: Vec<u8>) {
        self.secret = Some(secret);
    }

    /// What rank 0 shares with all: from now on callers who have it are heard here. What it came to.
    pub(crate) fn trust(&mut self, shared: &Token) -> Arc<Token> {
        let token = Arc::new(match &self.secret {
            Some(secret) => shared.with(secret),
            None => shared.clone(),
        });
        self.shm.trust(&token);
        self.ends.trust(&token);
        self.token = Some(token.clone());
        token
    }

    /// As [`Prepared::connect`] does, where rank 0's card came by a way that nobody else reads.
    pub fn trust_rank_info(&mut self, first: &RankInfo) {
        if let Some(shared) = &first.token {
            self.trust(shared);
        }
    }

    /// Second half, with the cards of all ranks in rank order, mine included.
    pub fn connect(mut self, rank_infos: Vec<RankInfo>) -> Result<Joined, JoinError> {
        if self.token.is_none() && rank_infos.len() > 1 {
            self.trust_rank_info(&rank_infos[0]);
            if self.token.is_none() {
                return Err(JoinError::Nodes(
                    "no token came from rank 0: its card is not the one that it made".to_owned(),
                ));
            }
        }
        let me = self.rank_info().rank as usize;
        let nodes = nodes(&rank_infos);
        let local_ranks =
            rank_infos.iter().filter(|rank_info| rank_info.boot == self.rank_info().boot).count();
        let here: Vec<usize> = (0..rank_infos.len()).filter(|&r| nodes[r] == nodes[me]).collect();
        if here.len() == rank_infos.len() {
            let group = group(me, self.shm, None, &rank_infos, here)?;
            return Ok(Joined { group, nodes, local_ranks, told: Vec::new() });
        }
        if self.options.between == InterNode::Nothing {
            return Err(JoinError::Nodes(forbidden(&rank_infos, &nodes)));
        }
        let (mut way, told) =
            self.ends.connect(me, &rank_infos, &nodes, &self.options).map_err(JoinError::Nodes)?;
        if let Some(script) = self.script {
            way.wire = Box::new(Scripted::new(way.wire, script));
        }
        let group = group(me, self.shm, Some(way), &rank_infos, here)?;
        Ok(Joined { group, nodes, local_ranks, told })
    }
}

/// Shared memory with the ranks `here`, and a way to all others, if there are any.
pub(super) fn group(
    me: usize,
    shm: shm::Prepared,
    way: Option<RemoteParts>,
    rank_infos: &[RankInfo],
    here: Vec<usize>,
) -> Result<Group, JoinError> {
    let local = shm.connect(here.iter().map(|&rank| rank_infos[rank].clone()).collect())?;
    let way = way.filter(|_| here.len() < rank_infos.len());
    let copies = way.as_ref().is_some_and(|way| way.wire.copies());
    let net = way.zip(local.home());
    let net =
        net.map(|(way, (endpoint, nonce))| RemoteChannels::new(me, rank_infos.len(), way, endpoint, nonce));
    let routes = Routes::new(me, rank_infos.len(), here, copies);
    Ok(Group::new(routes, rank_infos.iter().map(RankInfo::name).collect(), local, net))
}

fn forbidden(rank_infos: &[RankInfo], nodes: &[usize]) -> String {
    let other =
        rank_infos.iter().zip(nodes).find(|(_, node)| **node != nodes[0]).map(|(rank_info, _)| rank_info);
    format!(
        "{} and {} do not share memory ({}), and SMDDP_TRANSPORT=shm forbids any other way; unset it to go over the network",
        rank_infos[0].name(),
        other.map_or_else(String::new, RankInfo::name),
        other.map_or("", |other| apart(&rank_infos[0], other)),
    )
}

/// Each rank's node, from what the cards say: memory can be shared inside one boot of one host, by processes of one
/// user that see the same abstract sockets. Whether it really can is tried when the group is made.
pub(super) fn nodes(rank_infos: &[RankInfo]) -> Vec<usize> {
    let label = |rank_info: &RankInfo| {
        (rank_info.boot.clone(), rank_info.netns, rank_info.uid, rank_info.node.clone())
    };
    let mut seen: std::collections::HashMap<_, usize> = std::collections::HashMap::new();
    rank_infos
        .iter()
        .map(|rank_info| {
            let next = seen.len();
            *seen.entry(label(rank_info)).or_insert(next)
        })
        .collect()
}

/// What keeps two ranks from sharing memory.
fn apart(a: &RankInfo, b: &RankInfo) -> &'static str {
    if a.boot != b.boot {
        "they run on different hosts"
    } else if a.netns != b.netns {
        "their network namespaces differ, so unix sockets do not reach from one to the other"
    } else if a.uid != b.uid {
        "they run as different users"
    } else {
        "SMDDP_NODE or SMDDP_SHM says so, or a limit of one of these processes, which logged a warning"
    }
}
