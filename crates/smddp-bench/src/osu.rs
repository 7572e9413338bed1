//! Tables with the columns of the OSU benchmarks.

use crate::cli::Cli;
use crate::op::Op;
use crate::periter::PerIter;
use crate::row::{Osu, Row};
use crate::task::{Task, Test};

/// Returns the names of the columns after the size.
fn columns(task: Task) -> &'static [&'static str] {
    match task {
        Task::Messages(Test::Latency) => &["Latency (us)"],
        Task::Messages(Test::Bandwidth | Test::Bidirectional) => &["Bandwidth (MB/s)"],
        Task::Messages(Test::Rate) => &["MB/s", "Messages/s"],
        _ => &["Overall(us)", "Compute(us)", "Pure Comm.(us)", "Overlap(%)"],
    }
}

const ITERATIONS: [&str; 5] = ["i_min(us)", "i_p50(us)", "i_p90(us)", "i_p99(us)", "i_max(us)"];

/// Returns the name of the corresponding OSU program.
pub(crate) fn program(task: Task) -> String {
    let name = match task {
        Task::Messages(Test::Rate) => String::from("mbw_mr"),
        Task::Overlap(Op::ReduceScatter) => "ireduce_scatter".into(),
        Task::Overlap(Op::Broadcast) => "ibcast".into(),
        Task::Overlap(_) => task.name().replace('_', ""),
        _ => task.name().into(),
    };
    format!("osu_{name}")
}

/// Returns the header lines.
pub(crate) fn head(cli: &Cli, ranks: usize) -> Vec<String> {
    let about = match cli.task {
        Task::Messages(Test::Latency) => format!("# [ pairs: {} ]", ranks / 2),
        Task::Messages(_) => format!("# [ pairs: {} ] [ window size: {} ]", ranks / 2, cli.window),
        _ => {
            "# Overall: call and computation together; Compute: alone, as long as the call alone (Pure Comm.)"
                .into()
        }
    };
    let mut line = format!("{:<10}", "# Size");
    columns(cli.task).iter().for_each(|name| line.push_str(&format!("{name:>18}")));
    if cli.per_iter == 1 {
        ITERATIONS.iter().for_each(|name| line.push_str(&format!("{name:>12}")));
    }
    vec![about, format!("{line}{:>12}", "Validation")]
}

/// Describes type, reduction and root of the next rows, if the test can have several.
pub(crate) fn call(row: &Row) -> Option<String> {
    let described = matches!(row.osu, Some(Osu::Overlap { .. })) && row.dtype != "none";
    described.then(|| {
        let root = if row.root < 0 { String::new() } else { format!(" Root: {}.", row.root) };
        let redop = if row.redop == "none" { String::new() } else { format!(" Reduction: {}.", row.redop) };
        format!("# Datatype: {}.{redop}{root}", row.dtype)
    })
}

/// Returns the line of a row, or `None` for a test that is not from OSU.
pub(crate) fn line(row: &Row, task: Task) -> Option<String> {
    let us = row.out_of_place.seconds * 1e6;
    let figures = match (row.osu?, task) {
        (Osu::Messages { .. }, Task::Messages(Test::Latency)) => vec![us],
        (Osu::Messages { mb_per_s, messages_per_s }, Task::Messages(Test::Rate)) => {
            vec![mb_per_s, messages_per_s]
        }
        (Osu::Messages { mb_per_s, .. }, _) => vec![mb_per_s],
        (Osu::Overlap { compute_us, communication_us, overlap_pct }, _) => {
            vec![us, compute_us, communication_us, overlap_pct]
        }
    };
    let mut line = format!("{:<10}", row.bytes);
    figures.iter().for_each(|figure| line.push_str(&format!("{figure:>18.2}")));
    if let Some(PerIter { min_us, p50_us, p90_us, p99_us, max_us, .. }) = row.out_of_place.per_iter {
        [min_us, p50_us, p90_us, p99_us, max_us].iter().for_each(|us| line.push_str(&format!("{us:>12.2}")));
    }
    let verdict = match row.out_of_place.wrong {
        None => "N/A",
        Some(0) => "Pass",
        Some(_) => "Fail",
    };
    Some(format!("{line}{verdict:>12}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Measure;
    use clap::Parser;

    fn row(osu: Osu) -> Row {
        let half = Measure { seconds: 12.5e-6, wrong: Some(0), ..Measure::default() };
        Row {
            bytes: 1024,
            count: 1024,
            dtype: "float",
            redop: "sum",
            root: -1,
            in_place: half.clone(),
            out_of_place: half,
            path: None,
            osu: Some(osu),
        }
    }

    fn cli(line: &str) -> Cli {
        Cli::try_parse_from(["x"].into_iter().chain(line.split(' '))).unwrap()
    }

    #[test]
    fn columns_match_osu() {
        let messages = Osu::Messages { mb_per_s: 8765.432, messages_per_s: 8_559_992.187 };
        let overlap = Osu::Overlap { compute_us: 10.5, communication_us: 10.25, overlap_pct: 82.0 };
        for (task, osu, head_line, text) in [
            (
                "latency",
                messages,
                "# Size          Latency (us)  Validation",
                "1024                   12.50        Pass",
            ),
            (
                "bw",
                messages,
                "# Size      Bandwidth (MB/s)  Validation",
                "1024                 8765.43        Pass",
            ),
            (
                "osu_mbw_mr",
                messages,
                "# Size                  MB/s        Messages/s  Validation",
                "1024                 8765.43        8559992.19        Pass",
            ),
            (
                "iall_reduce",
                overlap,
                "# Size           Overall(us)       Compute(us)    Pure Comm.(us)        Overlap(%)  Validation",
                "1024                   12.50             10.50             10.25             82.00        Pass",
            ),
        ] {
            let cli = cli(task);
            assert_eq!(head(&cli, 4)[1], head_line);
            assert_eq!(line(&row(osu), cli.task).unwrap(), text);
        }
        for (task, name) in [
            ("latency", "osu_latency"),
            ("message_rate", "osu_mbw_mr"),
            ("iall_gather", "osu_iallgather"),
            ("ireduce_scatter", "osu_ireduce_scatter"),
            ("ibroadcast", "osu_ibcast"),
        ] {
            assert_eq!(program(cli(task).task), name);
        }
        assert_eq!(head(&cli("bibw -W 8"), 4)[0], "# [ pairs: 2 ] [ window size: 8 ]");
        assert_eq!(call(&row(overlap)).unwrap(), "# Datatype: float. Reduction: sum.");
    }
}
