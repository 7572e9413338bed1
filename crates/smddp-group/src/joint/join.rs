//! Creation of a group: the transports that this rank offers, and their selection from the offers of all ranks.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use smddp_net::token::Token;
use smddp_process::Endpoint;
use smddp_shm::{RankAddress, Unreachable};

use super::group::Group;
use super::options::{InterNode, TransportOptions};
use super::routes::Routes;
use super::scripted::{Scripted, WireScript};
use super::transports::LocalTransports;
use crate::RankInfo;
use crate::bootstrap::RankTree;
use crate::channels::{RemoteChannels, RemoteParts};

/// Reason why a group cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// A rank of this node cannot be reached through shared memory.
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    /// Ranks of different nodes cannot be connected, for the given reason.
    #[error("{0}")]
    Nodes(String),
}

/// A group and the node of each rank.
pub struct Joined {
    /// This rank's end of the communicator.
    pub group: Group,
    /// Node index of each rank, by rank; nodes are numbered in the order of their first ranks.
    pub nodes: Vec<usize>,
    /// Number of ranks on this host. They share its cores, even if they do not share memory.
    pub local_ranks: usize,
    /// Log lines about the transports between nodes and the reasons for their selection.
    pub log_lines: Vec<String>,
}

impl Joined {
    /// Assumes distant caches of the readers and ignores measurements. For tests.
    pub fn assume_distant_readers(&mut self) {
        self.group.local.assume_distant_readers();
    }
}

/// Keeps this process's endpoint open to the other ranks of a group.
///
/// A rank that fails in `init` holds it until its error is in the store: a closed socket looks like the end of the process.
pub struct OpenEndpoint {
    _endpoint: Option<Arc<Endpoint>>,
    _token: Option<Arc<Token>>,
}

/// First step of creating a group. It does not wait for other ranks.
pub struct Prepared {
    shm: smddp_shm::Prepared,
    rank_info: RankInfo,
    transports: LocalTransports,
    options: TransportOptions,
    script: Option<WireScript>,
    /// Job secret, which the group's store does not contain.
    secret: Option<Vec<u8>>,
    token: Option<Arc<Token>>,
}

impl Prepared {
    /// Opens this process's endpoint and the transports that `options` allow. `settings`: settings that all ranks must share, as
    /// (name, value).
    ///
    /// # Errors
    /// The endpoint cannot be created, its shared memory has no room for the group's control block, or the kernel returns no random
    /// bytes for the token.
    pub fn new(
        rank: usize,
        size: usize,
        settings: Vec<(String, String)>,
        options: &TransportOptions,
    ) -> io::Result<Self> {
        // Created before `smddp_shm::Prepared` requests the endpoint without the number of ranks.
        let here = options.local.map_or(size, |(_, ranks)| ranks.min(size));
        let endpoint = (size > 1)
            .then(|| Endpoint::with_local_ranks(options.staging, if options.shm { here } else { 1 }))
            .transpose()?;
        let shm = smddp_shm::Prepared::new(rank, size, options.staging)?;
        let token = (rank == 0 && size > 1).then(Token::random).transpose()?;
        let mut rank_info = RankInfo::new(shm.address().clone(), settings, token);
        let mut transports = LocalTransports::default();
        if let Some(endpoint) = endpoint {
            let alone = (!options.shm || !endpoint.is_shared()).then(|| format!("rank {rank}"));
            rank_info.node = alone.or_else(|| options.node.clone()).unwrap_or_default();
            (transports, rank_info.offer) = LocalTransports::open(&endpoint, rank, size, options);
        }
        let options = options.clone();
        Ok(Self { shm, rank_info, transports, options, script: None, secret: None, token: None })
    }

    /// Returns this rank's information, which the other ranks need for [`Prepared::connect`].
    pub fn rank_info(&self) -> &RankInfo {
        &self.rank_info
    }

    /// Keeps the endpoint open after [`Prepared::connect`] has failed.
    pub fn open_endpoint(&self) -> OpenEndpoint {
        OpenEndpoint { _endpoint: Endpoint::existing(), _token: self.token.clone() }
    }

    /// Sets the caller's data in this rank's information.
    pub fn set_user_data(&mut self, user_data: Vec<u8>) {
        self.rank_info.user_data = user_data;
    }

    /// Makes the wire to other nodes follow the script of a test.
    pub fn set_script(&mut self, script: WireScript) {
        self.script = Some(script);
    }

    /// Creates this rank's part of the tree through which ranks exchange their information.
    ///
    /// # Errors
    /// The rank cannot open its unix listener: the kernel provides no socket.
    pub fn tree(&mut self) -> io::Result<RankTree> {
        let shared = self.rank_info().token.clone();
        let token = shared.map(|shared| self.trust(&shared));
        RankTree::new(&self.rank_info, token, self.secret.as_deref())
    }

    /// Connects `tree` to its parent. `first`, `parent`: address records of rank 0 and of the parent. Returns true if the parent's
    /// record is a new one.
    ///
    /// # Errors
    /// A record is malformed, or belongs to another version or another job token, or that of rank 0 has no group token. The text names
    /// the rank.
    pub fn connect_parent(
        &mut self,
        tree: &mut RankTree,
        first: &[u8],
        parent: &[u8],
        now: Instant,
    ) -> Result<bool, String> {
        let shared = tree.shared_token(first).map_err(|reason| format!("rank 0 has {reason}"))?;
        let token = self.trust(&shared);
        tree.set_parent(token, parent, now)
            .map_err(|reason| format!("rank {} has {reason}", tree.parent().unwrap_or(0)))
    }

    /// Sets the job secret. Call it before all other methods. Only ranks with the same secret can form a group.
    pub fn set_secret(&mut self, secret: Vec<u8>) {
        self.secret = Some(secret);
    }

    /// Accepts connections authenticated by the group token, derived from `shared` and the job secret. Returns that token.
    pub(crate) fn trust(&mut self, shared: &Token) -> Arc<Token> {
        let token = Arc::new(match &self.secret {
            Some(secret) => shared.with(secret),
            None => shared.clone(),
        });
        self.shm.trust(&token);
        self.transports.trust(&token);
        self.token = Some(token.clone());
        token
    }

    /// Trusts the token in rank 0's information, which must have travelled through a confidential channel.
    /// [`Prepared::connect`] does the same.
    pub fn trust_rank_info(&mut self, first: &RankInfo) {
        if let Some(shared) = &first.token {
            self.trust(shared);
        }
    }

    /// Creates the group from the information of all ranks in rank order, including this rank's.
    ///
    /// # Errors
    /// [`JoinError`]: ranks cannot share memory, have no common transport, or have no address that the others can reach.
    pub fn connect(mut self, rank_infos: Vec<RankInfo>) -> Result<Joined, JoinError> {
        if self.token.is_none() && rank_infos.len() > 1 {
            self.trust_rank_info(&rank_infos[0]);
            if self.token.is_none() {
                return Err(JoinError::Nodes(
                    "the rank information of rank 0 has no group token: it was changed in transit".to_owned(),
                ));
            }
        }
        let me = self.rank_info.address.rank as usize;
        let nodes = nodes(&rank_infos);
        let id = self.token.as_ref().map(|token| token.id());
        let boot = &self.rank_info.address.boot;
        let local_ranks = rank_infos.iter().filter(|rank_info| rank_info.address.boot == *boot).count();
        let here: Vec<usize> = (0..rank_infos.len()).filter(|&r| nodes[r] == nodes[me]).collect();
        if here.len() == rank_infos.len() {
            let group = group(me, (self.shm, id), None, &rank_infos, here)?;
            return Ok(Joined { group, nodes, local_ranks, log_lines: Vec::new() });
        }
        if self.options.inter_node == InterNode::Nothing {
            return Err(JoinError::Nodes(forbidden(&rank_infos, &nodes)));
        }
        let (mut parts, log_lines) =
            self.transports.connect(me, &rank_infos, &nodes, &self.options).map_err(JoinError::Nodes)?;
        if let Some(script) = self.script {
            parts.wire = Box::new(Scripted::new(parts.wire, script));
        }
        let group = group(me, (self.shm, id), Some(parts), &rank_infos, here)?;
        Ok(Joined { group, nodes, local_ranks, log_lines })
    }
}

/// Creates a group with shared memory between the ranks `here` and the wire of `parts` to all other ranks, if there are any.
fn group(
    me: usize,
    (shm, id): (smddp_shm::Prepared, Option<[u8; 16]>),
    parts: Option<RemoteParts>,
    rank_infos: &[RankInfo],
    here: Vec<usize>,
) -> Result<Group, JoinError> {
    let local = shm.connect(here.iter().map(|&rank| rank_infos[rank].address.clone()).collect())?;
    let parts = parts.filter(|_| here.len() < rank_infos.len());
    let copies = parts.as_ref().is_some_and(|parts| parts.wire.capabilities().copies_payloads);
    let net = parts.zip(local.home());
    let net = net
        .map(|(parts, (endpoint, nonce))| RemoteChannels::new(me, rank_infos.len(), parts, endpoint, nonce));
    let routes = Routes::new(me, rank_infos.len(), here, copies);
    let names = rank_infos.iter().map(RankInfo::name).collect();
    Ok(Group::new(routes, (names, id), local, net))
}

fn forbidden(rank_infos: &[RankInfo], nodes: &[usize]) -> String {
    let other =
        rank_infos.iter().zip(nodes).find(|(_, node)| **node != nodes[0]).map(|(rank_info, _)| rank_info);
    format!(
        "{} and {} do not share memory ({}), and SMDDP_TRANSPORT=shm forbids any other transport; unset it to use the network",
        rank_infos[0].name(),
        other.map_or_else(String::new, RankInfo::name),
        other.map_or("", |other| apart(&rank_infos[0].address, &other.address)),
    )
}

/// Returns each rank's node according to the rank information. Processes can share memory within one boot of one host if they run
/// as one user and see the same abstract sockets. Creating the group verifies that they can.
pub(super) fn nodes(rank_infos: &[RankInfo]) -> Vec<usize> {
    let label = |RankInfo { address, node, .. }: &RankInfo| {
        (address.boot.clone(), address.netns, address.uid, node.clone())
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

/// Returns the reason why two ranks do not share memory.
fn apart(a: &RankAddress, b: &RankAddress) -> &'static str {
    if a.boot != b.boot {
        "they run on different hosts"
    } else if a.netns != b.netns {
        "their network namespaces differ, so unix sockets do not reach from one to the other"
    } else if a.uid != b.uid {
        "they run as different users"
    } else {
        "SMDDP_NODE puts them on different nodes, or a limit of one of these processes forbids it: see its warning"
    }
}
