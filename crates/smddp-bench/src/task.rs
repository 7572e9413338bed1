//! What to do, by its name.

use std::str::FromStr;

use crate::op::Op;

/// What to do: the positional argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    Measure(Op),
    /// Messages between pairs of ranks.
    Messages(Test),
    /// A collective beside a computation.
    Overlap(Op),
    /// Obey a coordinator of side-by-side measurements.
    #[cfg(feature = "lab")]
    Worker,
    /// Time and memory of making a group.
    Startup,
    /// List the engine's settings.
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
    /// All of them, by the names that tables and files have.
    pub(crate) fn names() -> Vec<&'static str> {
        let measured = Op::ALL.map(Task::Measure).into_iter();
        let beside = Op::ALL.into_iter().filter(|op| op.collective().is_some()).map(Task::Overlap);
        let messages = Test::ALL.map(Task::Messages);
        measured.chain(messages).chain(beside).chain([Task::Startup, Task::Info]).map(Task::name).collect()
    }

    /// As tables and files call it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Task::Measure(op) => op.name(),
            Task::Messages(test) => test.name(),
            Task::Overlap(op) => beside(op),
            Task::Startup => "startup",
            Task::Info => "info",
            #[cfg(feature = "lab")]
            Task::Worker => "worker",
        }
    }

    /// Whether the second half of a row is another measurement than the first.
    pub(crate) const fn has_in_place(self) -> bool {
        matches!(self, Task::Measure(op) if op.has_in_place())
    }

    /// OSU's tests have osu_ before their names, or nothing.
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
            format!("{error}; of messages {tests}; beside a computation iall_reduce, iall_gather, ...")
        })
    }
}

/// A collective's name beside a computation.
fn beside(op: Op) -> &'static str {
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
        // These have no form that goes on by itself.
        Op::SendRecv | Op::Hypercube | Op::AllToAllV => op.name(),
    }
}

/// A test of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Test {
    /// A message there and one back; half of that time.
    Latency,
    /// A window of messages one way, then an answer.
    Bandwidth,
    /// A window each way at the same time.
    Bidirectional,
    /// As `Bandwidth`, and messages in a second.
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

    /// By our names, with hyphens or none, and by OSU's.
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
