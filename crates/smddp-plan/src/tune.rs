//! Tuning tables: algorithms by collective and size, in the syntax of `SMDDP_TUNE` and `smddp-bench tune`.
//!
//! ```text
//! all_gather:64k-4m:@hier#all_gather:4m-inf:@hier-log#all_reduce:0-32k:host:[8]:@tree
//! ```
//!
//! An entry is `COLLECTIVE:WHEN:@ALGORITHM`. `WHEN` has any of these conditions, separated by `:`
//! - `FROM-TO`: sizes of the whole buffer from `FROM` bytes to below `TO`; `inf` is unbounded.
//! - `host` or `cuda`: memory of the buffers.
//! - `[8]` or `[2-16]`: ranks of the group; `inf` is unbounded.
//!
//! A missing condition matches everything, as in `all_gather:@ring`. Entries are separated by `#` or a
//! newline. A line that starts with `# ` is a comment. If entries overlap, the last one applies. (The syntax
//! follows UCC's tables.)

use std::fmt;
use std::ops::RangeInclusive;

use crate::algorithms::Algorithm;
use crate::ir::Collective;
use crate::names::nearest;

/// One entry: sizes `from..to` of a collective.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Collective to which the entry applies.
    pub collective: Collective,
    /// Minimum size of the whole buffer in bytes.
    pub from: u64,
    /// `u64::MAX` is unbounded.
    pub to: u64,
    /// `None` matches any memory.
    pub memory: Option<MemoryKind>,
    /// Ranks of the group; `usize::MAX` is unbounded.
    pub ranks: RangeInclusive<usize>,
    /// Algorithm for matching calls.
    pub algorithm: Algorithm,
}

/// Memory of the buffers of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// Host memory.
    Host,
    /// Device memory.
    Cuda,
}

impl MemoryKind {
    /// All memory kinds.
    pub const ALL: [Self; 2] = [Self::Host, Self::Cuda];

    /// Returns the name used in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cuda => "cuda",
        }
    }
}

/// Ranks that match groups of any size.
pub const ANY_RANKS: RangeInclusive<usize> = 1..=usize::MAX;

/// A tuning table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table {
    /// Entries in the order of the text. The last matching one applies.
    pub entries: Vec<Entry>,
}

/// Error in a table. Line and column count from 1, the column in characters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {reason}")]
pub struct Error {
    /// Line, from 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// Description of the error.
    pub reason: String,
}

impl Table {
    /// Parses a table.
    ///
    /// # Errors
    /// Returns the first error with its position. For an unknown name it suggests the most similar one.
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut entries = Vec::new();
        for (line, content) in text.lines().enumerate() {
            let trimmed = content.trim_start();
            if trimmed == "#" || trimmed.starts_with("# ") {
                continue;
            }
            let mut column = 0;
            for piece in content.split('#') {
                if !piece.trim().is_empty() {
                    let blanks = piece.chars().take_while(|c| c.is_whitespace()).count();
                    let error = |(at, reason): (usize, String)| {
                        let column = 1 + column + blanks + piece.trim().chars().count().min(at);
                        Error { line: line + 1, column, reason }
                    };
                    entries.push(entry(piece.trim()).map_err(error)?);
                }
                column += piece.chars().count() + 1;
            }
        }
        Ok(Self { entries })
    }

    /// Returns the algorithm for a collective of `bytes` (the whole buffer) in this memory and for this
    /// number of ranks. `None` if no entry matches.
    pub fn algorithm(
        &self,
        collective: Collective,
        bytes: u64,
        memory: MemoryKind,
        ranks: usize,
    ) -> Option<Algorithm> {
        let holds = |e: &&Entry| {
            e.collective == collective
                && e.from <= bytes
                && (bytes < e.to || e.to == u64::MAX)
                && e.memory.is_none_or(|requested| requested == memory)
                && e.ranks.contains(&ranks)
        };
        self.entries.iter().rev().find(holds).map(|entry| entry.algorithm)
    }
}

impl fmt::Display for Table {
    /// Prints one line, as `SMDDP_TUNE` accepts it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, entry) in self.entries.iter().enumerate() {
            if i > 0 {
                f.write_str("#")?;
            }
            entry.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { collective, from, to, memory, ref ranks, algorithm } = *self;
        write!(f, "{}:{}-{}", collective_name(collective), size(from), size(to))?;
        if let Some(memory) = memory {
            write!(f, ":{}", memory.name())?;
        }
        match (*ranks.start(), *ranks.end()) {
            (1, usize::MAX) => {}
            (least, usize::MAX) => write!(f, ":[{least}-inf]")?,
            (least, most) if least == most => write!(f, ":[{least}]")?,
            (least, most) => write!(f, ":[{least}-{most}]")?,
        }
        write!(f, ":@{}", algorithm.name())
    }
}

/// Returns the name of a collective in tables and logs.
pub const fn collective_name(collective: Collective) -> &'static str {
    match collective {
        Collective::AllGather => "all_gather",
        Collective::ReduceScatter => "reduce_scatter",
        Collective::AllReduce => "all_reduce",
        Collective::Broadcast => "broadcast",
        Collective::Reduce => "reduce",
        Collective::Gather => "gather",
        Collective::Scatter => "scatter",
        Collective::AllToAll => "all_to_all",
        Collective::Barrier => "barrier",
    }
}

/// Parses one entry. The position of an error in `text` counts from 0.
fn entry(text: &str) -> Result<Entry, (usize, String)> {
    let parts: Vec<&str> = text.split(':').collect();
    let [name, ref when @ .., algorithm] = parts[..] else {
        return Err((0, format!("invalid entry '{text}': expected COLLECTIVE:WHEN:@ALGORITHM")));
    };
    let collective = Collective::ALL
        .into_iter()
        .find(|&c| collective_name(c) == name)
        .ok_or_else(|| (0, unknown("collective", name, Collective::ALL.map(collective_name).into_iter())))?;
    let mut at = name.chars().count() + 1;
    let (mut sizes, mut memory, mut ranks) = (None, None, None);
    for part in when {
        let repeated = if let Some(inside) = part.strip_prefix('[') {
            ranks.replace(rank_range(part, inside).map_err(|reason| (at, reason))?).is_some()
        } else if let Some(known) = MemoryKind::ALL.into_iter().find(|memory| memory.name() == *part) {
            memory.replace(known).is_some()
        } else {
            sizes.replace(bounds(part).map_err(|reason| (at, reason))?).is_some()
        };
        if repeated {
            return Err((at, format!("'{part}' repeats a condition of this entry")));
        }
        at += part.chars().count() + 1;
    }
    let Some(requested) = algorithm.strip_prefix('@') else {
        return Err((at, format!("invalid algorithm '{algorithm}': expected @ and a name, such as @ring")));
    };
    let algorithm = Algorithm::from_name(requested).ok_or_else(|| {
        (at + 1, unknown("algorithm", requested, Algorithm::ALL.into_iter().flat_map(Algorithm::spellings)))
    })?;
    let (from, to) = sizes.unwrap_or((0, u64::MAX));
    Ok(Entry { collective, from, to, memory, ranks: ranks.unwrap_or(ANY_RANKS), algorithm })
}

/// Parses `[8]`, `[2-16]`, `[9-inf]`.
fn rank_range(text: &str, inside: &str) -> Result<RangeInclusive<usize>, String> {
    let number = |text: &str| match text.trim() {
        "inf" => Some(usize::MAX),
        number => number.parse::<usize>().ok().filter(|&ranks| ranks > 0),
    };
    let ends = inside.strip_suffix(']').map(|inside| inside.split_once('-').unwrap_or((inside, inside)));
    let ranks = ends.and_then(|(least, most)| Some(number(least)?..=number(most)?));
    match ranks {
        Some(ranks) if ranks.is_empty() => Err(format!("the range of ranks '{text}' is empty")),
        Some(ranks) if *ranks.start() < usize::MAX => Ok(ranks),
        _ => {
            Err(format!("invalid ranks '{text}': expected a number or range such as [8], [2-16] or [9-inf]"))
        }
    }
}

fn bounds(range: &str) -> Result<(u64, u64), String> {
    let (from, to) = range.split_once('-').ok_or_else(|| {
        format!("invalid condition '{range}': expected sizes such as 64k-4m or 4m-inf, host, cuda, or ranks such as [8]")
    })?;
    let (from, to) = (bytes(from)?, bytes(to)?);
    if from >= to {
        return Err(format!("the range '{range}' is empty"));
    }
    Ok((from, to))
}

/// Parses `64`, `8k`, `4M`, `2g`, `inf`; units are powers of 1024.
fn bytes(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    if lower == "inf" {
        return Ok(u64::MAX);
    }
    let units = [('k', 10), ('m', 20), ('g', 30), ('t', 40)];
    let (digits, shift) = units
        .iter()
        .find_map(|&(unit, shift)| Some((lower.strip_suffix(unit)?, shift)))
        .unwrap_or((&lower, 0));
    let value = digits.parse::<u64>().ok().and_then(|value| value.checked_mul(1 << shift));
    value.ok_or_else(|| format!("invalid size '{text}': expected a size such as 0, 64k, 4m or inf"))
}

/// Returns the shortest notation of a size.
fn size(bytes: u64) -> String {
    if bytes == u64::MAX {
        return "inf".into();
    }
    let units = [("g", 30), ("m", 20), ("k", 10)];
    match units.iter().find(|(_, shift)| bytes > 0 && bytes.is_multiple_of(1 << shift)) {
        Some((unit, shift)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}

fn unknown(kind: &str, name: &str, names: impl Iterator<Item = &'static str>) -> String {
    let names: Vec<&str> = names.collect();
    match nearest(name, names.iter().copied()) {
        Some(similar) => format!("unknown {kind} '{name}'; did you mean {similar}?"),
        None => format!("unknown {kind} '{name}': expected one of {}", names.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_selects_the_algorithm_by_size() {
        let table = Table::parse("all_gather:64k-4m:@ring#all_reduce:0-32k:@tree").unwrap();
        let of = |collective, bytes| table.algorithm(collective, bytes, MemoryKind::Host, 8);
        assert_eq!(of(Collective::AllGather, (64 << 10) - 1), None);
        assert_eq!(of(Collective::AllGather, 64 << 10), Some(Algorithm::HierRing));
        assert_eq!(of(Collective::AllGather, (4 << 20) - 1), Some(Algorithm::HierRing));
        assert_eq!(of(Collective::AllGather, 4 << 20), None);
        assert_eq!(of(Collective::AllReduce, 0), Some(Algorithm::HierTree));
        assert_eq!(of(Collective::Broadcast, 1), None);
    }

    #[test]
    fn printed_table_parses_to_the_same_table() {
        let text = "all_gather:64k-4m:@mesh#all_reduce:0-1000:@hier-log#barrier:0-inf:@hier-log";
        let table = Table::parse(text).unwrap();
        assert_eq!(table.to_string(), text);
        assert_eq!(Table::parse(&table.to_string()).unwrap(), table);
        assert_eq!(
            table.algorithm(Collective::Barrier, u64::MAX, MemoryKind::Host, 2),
            Some(Algorithm::HierLog)
        );
    }

    #[test]
    fn entry_may_match_one_memory_and_some_group_sizes() {
        let text = "all_gather:0-inf:@mesh#all_gather:0-1m:cuda:@hier-ring#all_gather:1k-inf:host:[8]:@hier-log\
                    #reduce:0-inf:[2-3]:@hier-tree#reduce:0-inf:[9-inf]:@mesh";
        let table = Table::parse(text).unwrap();
        assert_eq!(table.to_string(), text);
        let gather = |memory, ranks| table.algorithm(Collective::AllGather, 1 << 10, memory, ranks);
        assert_eq!(gather(MemoryKind::Host, 8), Some(Algorithm::HierLog));
        assert_eq!(gather(MemoryKind::Host, 7), Some(Algorithm::Mesh));
        assert_eq!(gather(MemoryKind::Cuda, 8), Some(Algorithm::HierRing));
        let reduce = |ranks| table.algorithm(Collective::Reduce, 0, MemoryKind::Host, ranks);
        let found = [1, 2, 3, 4, 8, 9, 4096].map(reduce);
        let (tree, mesh) = (Some(Algorithm::HierTree), Some(Algorithm::Mesh));
        assert_eq!(found, [None, tree, tree, None, None, mesh, mesh]);
        // Conditions in any order.
        let other = Table::parse("all_gather:[2-2]:host:0-8k:@ring").unwrap();
        assert_eq!(other.to_string(), "all_gather:0-8k:host:[2]:@hier-ring");
    }

    #[test]
    fn lines_comments_blanks_and_missing_ranges_are_accepted() {
        let table = Table::parse(
            "# measured\n\n all_gather:@ring # all_gather:0-8K:@publish\nreduce:1g-1T:@tree\n#\n",
        );
        let table = table.unwrap();
        assert_eq!(
            table.to_string(),
            "all_gather:0-inf:@hier-ring#all_gather:0-8k:@publish#reduce:1g-1024g:@hier-tree"
        );
        // The last entry applies.
        let of = |bytes| table.algorithm(Collective::AllGather, bytes, MemoryKind::Host, 2);
        assert_eq!(of(8), Some(Algorithm::Publish));
        assert_eq!(of(8192), Some(Algorithm::HierRing));
        assert_eq!(Table::parse(" \n").unwrap(), Table::default());
    }

    #[test]
    fn errors_have_a_position() {
        for (text, line, column, expected) in [
            ("all_gater:0-1k:@ring", 1, 1, "did you mean all_gather?"),
            ("all_gather:0-1k:@ring#all_gather:0-1k:@rign", 1, 40, "did you mean ring?"),
            ("all_gather:0-1k:@ring\n  reduce:1k:@ring", 2, 10, "invalid condition '1k'"),
            ("reduce:1k-1x:@ring", 1, 8, "invalid size '1x'"),
            ("reduce:4k-4k:@ring", 1, 8, "empty"),
            ("reduce:0-4k:ring", 1, 13, "expected @"),
            ("reduce", 1, 1, "COLLECTIVE:WHEN:@ALGORITHM"),
            ("reduce:0-4k:hots:@ring", 1, 13, "host, cuda"),
            ("reduce:host:[0]:@ring", 1, 13, "invalid ranks"),
            ("reduce:[8-2]:@ring", 1, 8, "the range of ranks"),
            ("reduce:[inf]:@ring", 1, 8, "invalid ranks"),
            ("reduce:[2:@ring", 1, 8, "invalid ranks"),
            ("reduce:[2]:0-1k:[4]:@ring", 1, 17, "repeats a condition"),
            ("reduce:99999999999999g-inf:@ring", 1, 8, "invalid size"),
        ] {
            let error = Table::parse(text).unwrap_err();
            assert_eq!((error.line, error.column), (line, column), "{text}: {error}");
            assert!(error.to_string().contains(expected), "{text}: {error}");
        }
    }
}
