//! Deadlock probes as plain data: edges of the wait-for graph, messages between processes, and texts. The algorithm is
//! edge chasing (Chandy, Misra, Haas 1983) in the AND model: a collective needs all its ranks, and a message needs its peer.
//! A cycle of such waits therefore cannot resolve.

use serde::{Deserialize, Serialize};
use smddp_net::handshake::ProcessUid;

/// Maximum number of processes on a path.
pub(crate) const MAX_PATH: usize = 64;
/// Maximum length of a text of another process, in bytes.
pub(crate) const MAX_TEXT: usize = 240;

/// Remedy in errors about deadlocks.
const REMEDY: &str = "make the calls of these groups in the same order on every rank";

/// Action of the peer that a wait needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Needed {
    /// The peer begins the collective with this sequence number.
    Collective(u64),
    /// The peer sends a message with this tag. `taken`: number of announcements that the receiver has read.
    Send { tag: u64, taken: u64 },
    /// The peer receives a message with this tag. `index`: number of the announcement, from 1 on; 0 without one.
    Recv { tag: u64, index: u64 },
}

/// Edge of the wait-for graph: rank `from` of a group waits for rank `to`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Edge {
    pub(crate) group: String,
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) needed: Needed,
}

/// One blocked process on a path, and its edge to the next one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hop {
    pub(crate) process: ProcessUid,
    /// Number of the wait in its process.
    pub(crate) wait: u64,
    pub(crate) edge: Edge,
    /// "rank 3 (host h1, pid 812)".
    pub(crate) rank: String,
    /// "all_reduce #7".
    pub(crate) operation: String,
    /// Python line; empty without one.
    pub(crate) location: String,
}

/// Message between two processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Message {
    /// Probe along the last hop's edge. `round`: number of the probe at the first process.
    Probe { round: u64, path: Vec<Hop> },
    /// Confirmed cycle for the process `path[at]`, which stores it.
    Confirmed { at: usize, path: Vec<Hop> },
    /// The process `path[at]` ends its wait: all processes of the cycle have stored it.
    End { at: usize, path: Vec<Hop> },
}

impl Message {
    pub(crate) fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        postcard::to_allocvec(self)
    }

    /// Decodes and checks a message of another process. Returns `None` for invalid bytes. Texts are printable afterwards.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut message: Self = postcard::from_bytes(bytes).ok()?;
        let (path, at) = match &mut message {
            Self::Probe { path, .. } => (path, 0),
            Self::Confirmed { at, path } | Self::End { at, path } => (path, *at),
        };
        if path.is_empty() || path.len() > MAX_PATH || at >= path.len() {
            return None;
        }
        for hop in path {
            if hop.edge.group.len() > MAX_TEXT {
                return None;
            }
            for text in [&mut hop.rank, &mut hop.operation, &mut hop.location] {
                *text = printable(text);
            }
        }
        Some(message)
    }
}

/// Shortens a text and replaces its control characters.
pub(crate) fn printable(text: &str) -> String {
    let end = (0..=text.len().min(MAX_TEXT)).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
    text[..end].replace(char::is_control, " ")
}

/// Returns true if two probes found the same waits in the same order.
pub(crate) fn is_same_cycle(a: &[Hop], b: &[Hop]) -> bool {
    let key = |hop: &Hop| (hop.process, hop.wait, hop.edge.clone());
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| key(a) == key(b))
}

/// Describes a cycle, beginning with the process `first`.
pub(crate) fn describe(path: &[Hop], first: usize) -> String {
    let waits = (0..path.len()).map(|index| {
        let hop = &path[(first + index) % path.len()];
        let Hop { edge: Edge { group, to, .. }, rank, operation, location, .. } = hop;
        let group = printable(group);
        let location = if location.is_empty() { String::new() } else { format!(", at {location}") };
        format!("{rank} waits in {operation} of group `{group}` for rank {to} of it{location}")
    });
    let waits: Vec<String> = waits.collect();
    format!("deadlock of {} ranks: {}; {REMEDY}", path.len(), waits.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hop(process: u8, group: &str, number: u64) -> Hop {
        Hop {
            process: [process; 16],
            wait: u64::from(process) + 10,
            edge: Edge { group: group.to_owned(), from: 0, to: 1, needed: Needed::Collective(number) },
            rank: format!("rank {process} (host h, pid 7)"),
            operation: format!("all_reduce #{number}"),
            location: format!("train.py:{process} in step"),
        }
    }

    fn cycle() -> Vec<Hop> {
        vec![hop(0, "a", 3), hop(1, "b", 4)]
    }

    #[test]
    fn messages_round_trip_and_truncated_ones_are_rejected() {
        let path = cycle();
        for message in [
            Message::Probe { round: 2, path: path.clone() },
            Message::Confirmed { at: 1, path: path.clone() },
            Message::End { at: 0, path },
        ] {
            let bytes = message.encode().unwrap();
            assert_eq!(Message::decode(&bytes), Some(message));
            for end in 0..bytes.len() {
                assert_eq!(Message::decode(&bytes[..end]), None, "{end}");
            }
        }
    }

    #[test]
    fn hostile_messages_are_rejected_or_made_printable() {
        let decode = |message: Message| Message::decode(&message.encode().unwrap());
        assert_eq!(decode(Message::Probe { round: 0, path: Vec::new() }), None);
        assert_eq!(decode(Message::End { at: 2, path: cycle() }), None);
        assert_eq!(decode(Message::Probe { round: 0, path: vec![hop(0, "a", 1); MAX_PATH + 1] }), None);
        assert_eq!(
            decode(Message::Probe { round: 0, path: vec![hop(0, &"a".repeat(MAX_TEXT + 1), 1)] }),
            None
        );
        let mut odd = hop(0, "a", 1);
        odd.location = format!("\x1b[2J\n{}", "ü".repeat(1000));
        let Some(Message::Probe { path, .. }) = decode(Message::Probe { round: 0, path: vec![odd] }) else {
            panic!("a long text is shortened")
        };
        assert!(path[0].location.len() <= MAX_TEXT && !path[0].location.contains(char::is_control));
        let mut state = 1u64;
        for _ in 0..20_000 {
            let mut bytes = Message::Confirmed { at: 1, path: cycle() }.encode().unwrap();
            for _ in 0..3 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = (state >> 33) as usize % bytes.len();
                bytes[at] = (state >> 20) as u8;
            }
            // Must not panic or allocate without a limit.
            let _ = Message::decode(&bytes);
        }
    }

    #[test]
    fn cycles_with_another_wait_or_call_number_differ() {
        assert!(is_same_cycle(&cycle(), &cycle()));
        let mut other = cycle();
        other[1].wait += 1;
        assert!(!is_same_cycle(&cycle(), &other));
        assert!(!is_same_cycle(&cycle(), &[hop(0, "a", 3), hop(1, "b", 5)]));
        assert!(!is_same_cycle(&cycle(), &cycle()[..1]));
        let mut moved = cycle();
        moved[0].location = "train.py:9 in step".to_owned();
        assert!(is_same_cycle(&cycle(), &moved), "texts are not compared");
    }

    #[test]
    fn description_names_each_rank_with_call_and_line_and_begins_with_the_reader() {
        let text = describe(&cycle(), 1);
        assert_eq!(
            text,
            "deadlock of 2 ranks: rank 1 (host h, pid 7) waits in all_reduce #4 of group `b` for rank 1 of it, at train.py:1 in \
             step; rank 0 (host h, pid 7) waits in all_reduce #3 of group `a` for rank 1 of it, at train.py:0 in step; make the \
             calls of these groups in the same order on every rank"
        );
    }
}
