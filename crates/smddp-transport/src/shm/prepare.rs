//! The first half of making a group's near half, and its meeting with the other ranks' cards.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::near::Near;
use super::ranks::{Home, Ranks, RemoteRank};
use crate::Card;
use crate::process::layout::*;
use crate::process::peer::PeerProcess;
use crate::process::{Endpoint, UnixAddress, random};
use crate::token::Token;

/// What is left of the first half of making a group.
pub struct Prepared {
    /// A group of one rank has none.
    home: Option<Home>,
    card: Card,
}

/// Ranks that cannot be reached through shared memory.
#[derive(Debug, thiserror::Error)]
#[error("rank {rank} ({host}, pid {pid}) cannot share memory with this process: {why}")]
pub struct Unreachable {
    pub rank: usize,
    pub host: String,
    pub pid: u32,
    /// It was there, and is not any more.
    pub gone: bool,
    pub why: String,
}

impl Prepared {
    /// Takes a control block. A group of one rank needs none.
    pub fn new(
        rank: usize,
        size: usize,
        staging_cap: usize,
        settings: Vec<(String, String)>,
    ) -> io::Result<Self> {
        if size <= 1 {
            let card = Card::new(rank, size, settings, UnixAddress::default(), (0, 0));
            return Ok(Self { home: None, card });
        }
        let endpoint = Endpoint::get(staging_cap)?;
        let block = endpoint.control.take(&endpoint.memory, block_bytes(size)).ok_or_else(|| {
            io::Error::other("the control blocks of the live groups fill 256 MiB: destroy some groups")
        })?;
        // Differs between any two control blocks of any process.
        let nonce = u64::from_le_bytes(random()) | 1;
        // Release: whoever sees by it that the block's last group is over here sees what this process read there as read.
        endpoint.memory.word64(block + NONCE).store(nonce, Ordering::Release);
        endpoint.memory.word32(block + STATE).store(OPEN, Ordering::Release);
        let mut card = Card::new(rank, size, settings, endpoint.address.clone(), (block as u64, nonce));
        if rank == 0 {
            card.token = Some(Token::random()?);
        }
        Ok(Self { home: Some(Home { endpoint, block, nonce, size, token: None }), card })
    }

    /// From now on this process hears callers who have that token.
    pub(crate) fn trust(&mut self, token: &Arc<Token>) {
        if let Some(home) = &mut self.home {
            home.endpoint.trusted.add(token);
            home.token = Some(token.clone());
        }
    }

    /// With rank 0's card, where that came by a way that nobody else reads; any other says nothing.
    pub fn trust_card(&mut self, first: &Card) {
        if let Some(token) = &first.token {
            self.trust(&Arc::new(token.clone()));
        }
    }

    pub fn card(&self) -> &Card {
        &self.card
    }

    pub(crate) fn card_mut(&mut self) -> &mut Card {
        &mut self.card
    }

    /// Maps the memory of the ranks of this node: `cards` are theirs, ascending, mine included. The link numbers the
    /// ranks by their places in this list.
    pub fn connect(mut self, cards: Vec<Card>) -> Result<Near, Unreachable> {
        if self.home.as_ref().is_some_and(|home| home.token.is_none()) {
            cards.iter().for_each(|card| self.trust_card(card));
        }
        let me = cards.iter().position(|card| card.rank == self.card.rank).unwrap_or(0);
        let Some(Home { endpoint, token, .. }) = &self.home else {
            return Ok(Near::new(self.home, Ranks { remotes: Vec::new(), me }));
        };
        let mut remotes = Vec::with_capacity(cards.len());
        for card in cards {
            // Several ranks of one process (threads) share its memory as it is.
            let peer = if card.process.id == endpoint.address.id {
                None
            } else {
                Some(reach(endpoint, token.as_ref(), &self.card, &card)?)
            };
            let (home, block) = (endpoint.bell(), usize::try_from(card.block).unwrap_or(usize::MAX));
            let remote = RemoteRank { peer, home, block, nonce: card.nonce, card };
            // All of the block is read later as if it were there.
            if !remote.memory().holds(block, block_bytes(self.card.size as usize)) {
                let Card { rank, host, pid, .. } = remote.card;
                let why = format!("its card names a control block at {block}, outside of its memory");
                return Err(Unreachable { rank: rank as usize, host, pid, gone: false, why });
            }
            remotes.push(remote);
        }
        endpoint.deaths.look();
        Ok(Near::new(self.home, Ranks { remotes, me }))
    }
}

fn reach(
    endpoint: &Endpoint,
    token: Option<&Arc<Token>>,
    mine: &Card,
    card: &Card,
) -> Result<Arc<PeerProcess>, Unreachable> {
    let fail = |why: String| {
        let Card { rank, host, pid, .. } = card;
        Unreachable { rank: *rank as usize, host: host.clone(), pid: *pid, gone: false, why }
    };
    if card.boot != mine.boot {
        return Err(fail(format!("it runs on another host ({} here, {} there)", mine.host, card.host)));
    }
    let Some(token) = token else {
        return Err(fail("this rank has not heard the group's token".to_owned()));
    };
    endpoint.reach(&card.process, token).map_err(|error| {
        // It showed in the exchange of cards that it has the token, so it refuses nobody who has.
        let gone = matches!(
            error.kind(),
            ErrorKind::ConnectionRefused
                | ErrorKind::ConnectionReset
                | ErrorKind::BrokenPipe
                | ErrorKind::UnexpectedEof
        );
        let here = (card.netns, card.uid) == (mine.netns, mine.uid);
        let gone = gone && here;
        // A limit of this process: the other one is well.
        let why = if error.kind() == ErrorKind::OutOfMemory {
            format!("{error}; or set SMDDP_SHM=0 for all ranks to go over the network")
        } else if card.netns != mine.netns {
            format!("its network namespace differs, so its unix socket is out of reach ({error})")
        } else if card.uid != mine.uid {
            format!("it runs as user {}, this process as user {} ({error})", card.uid, mine.uid)
        } else if gone {
            format!("its unix socket is closed ({error})")
        } else {
            format!("its unix socket fails ({error}). Its log names the reason; SMDDP_SHM=0 uses the network instead")
        };
        Unreachable { gone, ..fail(why) }
    })
}
