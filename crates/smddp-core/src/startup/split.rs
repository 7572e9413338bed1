//! Groups of ranks of an existing group, created without a store: its collectives exchange the rank information.

use std::collections::BTreeSet;

use super::Pending;
use super::siblings::need_canonical_order;
use crate::communicator::{Communicator, Options};
use crate::config::Config;
use crate::error::{Error, Result};

/// Arguments of a rank's split call: its color, if it joins a group, and its key.
#[derive(Clone, Copy, PartialEq)]
struct SplitRequest {
    color: Option<i64>,
    key: i64,
}

impl SplitRequest {
    const BYTES: usize = 17;

    fn to_bytes(self) -> Vec<u8> {
        let color = self.color.unwrap_or(0).to_le_bytes();
        [&[u8::from(self.color.is_some())], &color[..], &self.key.to_le_bytes()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let number =
            |at: usize| bytes[at..at + 8].iter().rev().fold(0, |n: i64, byte| n << 8 | i64::from(*byte));
        Self { color: (bytes[0] != 0).then(|| number(1)), key: number(9) }
    }
}

/// Returns the ranks of one color in the order of the new group.
fn members(requests: &[SplitRequest], color: Option<i64>) -> Vec<usize> {
    let mut members: Vec<usize> =
        (0..requests.len()).filter(|&rank| color.is_some() && requests[rank].color == color).collect();
    members.sort_unstable_by_key(|&rank| (requests[rank].key, rank));
    members
}

/// Returns all groups of the split.
fn groups(requests: &[SplitRequest]) -> Vec<Vec<usize>> {
    let colors: BTreeSet<i64> = requests.iter().filter_map(|requests| requests.color).collect();
    colors.into_iter().map(|color| members(requests, Some(color))).collect()
}

impl Communicator {
    /// Splits the group into new ones, like `MPI_Comm_split`. Ranks of one `color` form a group, ordered by `key`
    /// and then by their rank here. A rank without a color joins no group. All ranks of the group make this call,
    /// in the same order among their other calls. The new group has the deadline of this one.
    ///
    /// # Errors
    /// Errors of a collective of this group. A failure of a rank to join its new group fails all ranks of that
    /// group.
    pub fn split(&self, color: Option<i64>, key: i64) -> Result<Option<Communicator>> {
        let (me, number) = (self.rank(), self.sequence());
        let call = format!("split #{number}");
        let requests = self
            .abort_on_interrupt("split", || self.all_gather_bytes(SplitRequest { color, key }.to_bytes()))
            .map_err(|error| error.within(&call))?;
        let requests: Vec<SplitRequest> =
            requests.chunks(SplitRequest::BYTES).map(SplitRequest::from_bytes).collect();
        let members = members(&requests, color);
        let name = format!("{}/split {} of color {}", self.name(), self.sequence(), color.unwrap_or(0));
        let siblings = groups(&requests);
        let pending = members.iter().position(|&rank| rank == me).map(|rank| {
            let canonical = need_canonical_order(Config::get()?, &name, &self.nodes(), &members, &siblings);
            let timeout = self.timeout(&Options::default());
            let pending_group = Pending::with_order(&name, rank, members.len(), timeout, canonical);
            pending_group.map(|pending| pending.for_call(&call))
        });
        let text = match &pending {
            None => Ok(Vec::new()),
            Some(Ok(pending)) => Ok(pending.rank_info()),
            Some(Err(error)) => Err(error.to_string()),
        };
        let texts = self
            .abort_on_interrupt("split", || self.all_gather_text(text))
            .map_err(|error| error.within(&call))?;
        let Some(pending) = pending.transpose()? else { return Ok(None) };
        let rank_info = |&rank: &usize| {
            texts[rank].clone().map_err(|reason| {
                Error::Topology(format!(
                    "{call} on group `{}` failed: {} cannot join group `{name}`: {reason}; correct the cause there and \
                     split again",
                    self.name(),
                    self.describe(rank),
                ))
            })
        };
        let rank_infos = members.iter().map(rank_info).collect::<Result<Vec<_>>>()?;
        pending.connect(&rank_infos).map(Some)
    }

    /// Gathers the rank information of every rank, or the reason why it has none.
    fn all_gather_text(&self, mine: Result<Vec<u8>, String>) -> Result<Vec<Result<Vec<u8>, String>>> {
        let (is_ok, mut mine) = (mine.is_ok(), mine.unwrap_or_else(String::into_bytes));
        let lengths = self.all_gather_bytes((mine.len() as u32).to_le_bytes().to_vec())?;
        let length = |at: &[u8]| u32::from_le_bytes([at[0], at[1], at[2], at[3]]) as usize;
        let lengths: Vec<usize> = lengths.chunks(4).map(length).collect();
        let stride = 1 + lengths.iter().max().unwrap_or(&0);
        mine.insert(0, u8::from(is_ok));
        mine.resize(stride, 0);
        let all = self.all_gather_bytes(mine)?;
        let text = |(all, &length): (&[u8], &usize)| {
            let text = all[1..=length].to_vec();
            if all[0] != 0 { Ok(text) } else { Err(String::from_utf8_lossy(&text).into_owned()) }
        };
        Ok(all.chunks(stride).zip(&lengths).map(text).collect())
    }
}
