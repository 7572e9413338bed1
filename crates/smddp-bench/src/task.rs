//! The task of the program, by name.

use std::str::FromStr;

use crate::op::Op;

/// The task: the positional argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    Measure(Op),
    /// Messages between pairs of ranks.
    Messages(Test),
    /// A collective overlapped with a computation.
    Overlap(Op),
    /// Runs the commands of a coordinator that compares libraries.
    #[cfg(feature = "lab")]
    Worker,
    /// Time and memory of creating a group.
    Startup,
    /// List of the engine's settings.
    Info,
}

impl FromStr for Task {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Task, String> {
        match text {
            #[cfg(feature = "lab")]
            "worker" => Ok(Task::Worker),
            "startup" => Ok(Task::Startup),
            "info" => Ok(Task::Info),
            _ => Task::measured(text),
        }
    }
}

impl Task {
    /// Returns the names of all tasks.
    pub(crate) fn names() -> Vec<&'static str> {
        let measured = Op::ALL.map(Task::Measure).into_iter();
        let nonblocking_name = Op::ALL.into_iter().filter(|op| op.collective().is_some()).map(Task::Overlap);
        let messages = Test::ALL.map(Task::Messages);
        measured
            .chain(messages)
            .chain(nonblocking_name)
            .chain([Task::Startup, Task::Info])
            .map(Task::name)
            .collect()
    }

    /// Returns the name in tables and files.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Task::Measure(op) => op.name(),
            Task::Messages(test) => test.name(),
            Task::Overlap(op) => nonblocking_name(op),
            Task::Startup => "startup",
            Task::Info => "info",
            #[cfg(feature = "lab")]
            Task::Worker => "worker",
        }
    }

    /// Returns true if the second half of a row is a separate measurement.
    pub(crate) const fn has_in_place(self) -> bool {
        matches!(self, Task::Measure(op) if op.has_in_place())
    }

    /// Parses a measurement. OSU's names may have the prefix osu_.
    fn measured(text: &str) -> std::result::Result<Task, String> {
        let plain = text.strip_prefix("osu_").unwrap_or(text);
        if let Some(test) = Test::named(plain) {
            return Ok(Task::Messages(test));
        }
        let overlapped = plain.strip_prefix('i').map(|name| if name == "bcast" { "broadcast" } else { name });
        if let Some(op) = overlapped.and_then(|name| name.parse::<Op>().ok())
            && op.collective().is_some()
        {
            return Ok(Task::Overlap(op));
        }
        text.parse().map(Task::Measure).map_err(|error: String| {
            let tests = Test::ALL.map(Test::name).join(", ");
            format!("{error}; a message test {tests}; or an overlap test iall_reduce, iall_gather, ...")
        })
    }
}

/// Returns the name of a collective's overlap test.
fn nonblocking_name(op: Op) -> &'static str {
    match op {
        Op::AllGather => "iall_gather",
        Op::ReduceScatter => "ireduce_scatter",
        Op::AllReduce => "iall_reduce",
        Op::Broadcast => "ibroadcast",
        Op::Reduce => "ireduce",
        Op::Gather => "igather",
        Op::Scatter => "iscatter",
        Op::AllToAll => "iall_to_all",
        Op::Barrier => "ibarrier",
        // These have no non-blocking form.
        Op::SendRecv | Op::Hypercube | Op::AllToAllV => op.name(),
    }
}

/// A point-to-point test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Test {
    /// Half of the time of a round trip.
    Latency,
    /// A window of messages in one direction, then a reply.
    Bandwidth,
    /// Windows in both directions concurrently.
    Bidirectional,
    /// As `Bandwidth`, with messages per second.
    Rate,
}

impl Test {
    pub(crate) const ALL: [Test; 4] = [Test::Latency, Test::Bandwidth, Test::Bidirectional, Test::Rate];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Test::Latency => "latency",
            Test::Bandwidth => "bw",
            Test::Bidirectional => "bibw",
            Test::Rate => "message_rate",
        }
    }

    /// Parses smddp's names, with or without hyphens, and OSU's names.
    pub(crate) fn named(text: &str) -> Option<Test> {
        match text.to_ascii_lowercase().replace(['_', '-'], "").as_str() {
            "latency" | "multilat" => Some(Test::Latency),
            "bw" => Some(Test::Bandwidth),
            "bibw" => Some(Test::Bidirectional),
            "messagerate" | "mbwmr" => Some(Test::Rate),
            _ => None,
        }
    }
}
