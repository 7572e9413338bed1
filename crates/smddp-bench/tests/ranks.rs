//! Tests of the program with real ranks on this machine. The tables are parsed.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

const COLLECTIVES: [&str; 12] = [
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
    "sendrecv",
    "hypercube",
    "alltoallv",
];

/// Returns the collectives that `ranks` ranks can run.
fn collectives(ranks: usize) -> impl Iterator<Item = &'static str> {
    COLLECTIVES.into_iter().filter(move |name| match *name {
        "sendrecv" => ranks > 1,
        "hypercube" => ranks.is_power_of_two(),
        _ => true,
    })
}

/// Returns true if the second half of a row is measured in place and checked.
fn has_in_place(collective: &str) -> bool {
    !matches!(collective, "all_to_all" | "alltoallv" | "barrier" | "sendrecv")
}

fn bench(args: &str) -> Output {
    bench_split("", args)
}

/// Runs the program with `NCCL_TESTS_SPLIT=split`.
fn bench_split(split: &str, args: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_smddp-bench"));
    for name in
        ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "NCCL_TESTS_SPLIT_MASK"]
    {
        command.env_remove(name);
    }
    command.env("NCCL_TESTS_SPLIT", split).args(args.split_whitespace()).output().unwrap()
}

/// Returns the rows of a successful run, with 13 columns each.
fn rows(args: &str) -> Vec<Vec<String>> {
    rows_of(bench(args), args)
}

fn rows_of(output: Output, args: &str) -> Vec<Vec<String>> {
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args}: {}\n{stdout}\n{stderr}", output.status);
    assert!(stdout.contains("\n# Out of bounds values : 0 OK\n"), "{args}\n{stdout}");
    let rows: Vec<Vec<String>> = stdout
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| line.split_whitespace().map(str::to_owned).collect())
        .collect();
    assert!(rows.iter().all(|row| row.len() == 13), "{args}\n{stdout}");
    rows
}

fn check_rows(collective: &str, args: &str) -> usize {
    let rows = rows(&format!("{collective} {args}"));
    for row in &rows {
        let second = if has_in_place(collective) { "0" } else { "N/A" };
        assert_eq!((row[8].as_str(), row[12].as_str()), ("0", second), "{collective} {args}: {row:?}");
        for figure in [5, 6, 7, 9, 10, 11] {
            assert!(row[figure].parse::<f64>().is_ok_and(|v| v >= 0.0), "{collective} {args}: {row:?}");
        }
    }
    rows.len()
}

#[test]
fn all_collectives_are_correct_with_two_ranks() {
    for collective in collectives(2) {
        let count = check_rows(collective, "--nproc 2 -b 8 -e 300K -f 8 -n 2 -w 1 --timeout 60");
        // 8, 64, 512, 4 K, 32 K, 256 K, and the largest size.
        assert_eq!(count, if collective == "barrier" { 1 } else { 7 }, "{collective}");
    }
}

#[test]
fn all_collectives_are_correct_with_three_ranks() {
    for collective in collectives(3) {
        // From 0 to a size that is not divisible by three.
        check_rows(collective, "--nproc 3 -b 0 -e 200K -f 11 -n 2 -w 1 --timeout 60");
    }
}

#[test]
fn hypercube_is_correct_in_every_dimension() {
    assert_eq!(check_rows("hypercube", "--nproc 8 -b 0 -e 100K -f 30 -n 2 -w 1 -z 1 --timeout 60"), 5);
    check_rows("hypercube_perf", "--nproc 4 -b 64K -e 64K -n 2 -w 1 -u 1 -d all --timeout 60");
}

#[test]
fn single_rank_is_correct() {
    for collective in collectives(1) {
        check_rows(collective, "-b 0 -e 10K -f 50 -n 2 -w 1");
    }
}

#[test]
fn all_roots_types_and_ops_are_correct() {
    assert_eq!(check_rows("broadcast", "--nproc 3 -b 1K -e 1K -n 1 -w 0 -r all --timeout 60"), 3);
    assert_eq!(check_rows("reduce", "--nproc 3 -b 1K -e 1K -n 1 -w 0 -r -1 --timeout 60"), 3);
    // 6 integer types with 9 ops, 4 float types with 6 ops, and no op for the two opaque types.
    assert_eq!(
        check_rows("all_reduce", "--nproc 3 -b 1001 -e 1001 -n 1 -w 0 -d all -o all --timeout 60"),
        78
    );
    assert_eq!(
        check_rows("reduce_scatter", "--nproc 2 -b 9K -e 9K -n 1 -w 0 -d all -o all --timeout 60"),
        78
    );
    assert_eq!(check_rows("all_gather", "--nproc 2 -b 1K -e 1K -n 1 -w 0 -d all --timeout 60"), 12);
}

#[test]
fn sizes_and_counts_refer_to_the_whole_buffer() {
    let size = |args: &str| rows(args).into_iter().map(|r| (r[0].clone(), r[1].clone())).collect::<Vec<_>>();
    let pair = |size: &str, count: &str| (size.to_owned(), count.to_owned());
    let run = "--nproc 3 -b 8 -e 64 -f 8 -n 1 -w 0 --timeout 60";
    assert_eq!(size(&format!("all_gather {run}")), [pair("0", "0"), pair("60", "5")]);
    assert_eq!(size(&format!("all_reduce {run}")), [pair("8", "2"), pair("64", "16")]);
}

#[test]
fn json_contains_the_figures_of_the_table() {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("bench-{}.json", std::process::id()));
    let rows = rows(&format!(
        "all_reduce_perf --nproc 2 -b 1K -e 4K -f 2 -n 1 -w 0 -J {} --timeout 60",
        path.display()
    ));
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let results = json["results"].as_array().unwrap();
    assert_eq!(results.len(), rows.len());
    for (result, row) in results.iter().zip(&rows) {
        assert_eq!(result["size"].to_string(), row[0]);
        assert_eq!(result["count"].to_string(), row[1]);
        assert_eq!(result["type"], row[2].as_str());
        assert_eq!(result["redop"], row[3].as_str());
        assert_eq!(result["root"].to_string(), row[4]);
        for half in ["out_of_place", "in_place"] {
            assert!(result[half]["time"].as_f64().is_some_and(|t| t > 0.0));
            assert!(result[half]["alg_bw"].is_f64() && result[half]["bus_bw"].is_f64());
            assert_eq!(result[half]["nwrong"], 0);
        }
    }
    assert_eq!(json["config"]["devices"].as_array().map(Vec::len), Some(2));
    assert_eq!(json["out_of_bounds"]["okay"], true);
}

#[test]
fn invalid_runs_are_errors() {
    for (args, status, expected) in [
        ("all_gathers", 2, "reduce_scatter"),
        ("broadcast -r 5", 2, "--root 5"),
        ("all_reduce -o band", 2, "band"),
        ("worker", 2, "PEERS_SOCK"),
        ("sendrecv", 2, "two ranks"),
        ("hypercube --nproc 3", 2, "power of two"),
        ("latency --nproc 3", 2, "an even number of ranks (--nproc N), not 3"),
        ("bw", 2, "an even number of ranks"),
        ("broadcast --nproc 2 -r 5 --timeout 60", 2, "--root 5 is not one of the 2 ranks"),
        ("all_reduce --nproc 2 -d f8e4m3", 2, "does not support reductions"),
        ("all_reduce --nproc 2 -G 1", 2, "CUDA graph"),
        ("all_gather -b 64 -e 64 -J /no/such/folder/x.json", 1, "/no/such/folder/x.json"),
    ] {
        let output = bench(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{args}: {stderr}");
        assert!(stderr.contains(expected), "{args}: {stderr}");
    }
}

#[test]
fn groups_run_concurrently_and_all_are_checked() {
    for (split, groups) in [("MOD 2", [0, 1, 0, 1]), ("DIV 2", [0, 0, 1, 1]), ("| 0x1", [1, 1, 3, 3])] {
        for collective in ["all_reduce", "reduce_scatter", "gather", "barrier", "sendrecv"] {
            let args = format!("{collective} --nproc 4 -b 8 -e 64K -f 16 -n 2 -w 1 -r all --timeout 60");
            let output = bench_split(split, &args);
            let listed: Vec<usize> = String::from_utf8_lossy(&output.stdout)
                .lines()
                .filter_map(|line| line.split_once(" Group ")?.1.split_whitespace().next()?.parse().ok())
                .collect();
            assert_eq!(listed, groups, "{split} {collective}");
            let rows = rows_of(output, &args);
            assert!(rows.iter().all(|row| row[8] == "0"), "{split} {collective}: {rows:?}");
            assert_eq!(
                rows.len(),
                [5, 10, 1][usize::from(collective == "gather") + 2 * usize::from(collective == "barrier")]
            );
        }
    }
}

#[test]
fn bandwidth_and_counts_refer_to_a_group() {
    let of = |split: &str, column: usize| {
        let args = "all_gather --nproc 3 -b 48 -e 48 -n 2 -w 1 --timeout 60";
        rows_of(bench_split(split, args), args)[0][column].clone()
    };
    // 12 elements of 4 bytes: the block of one of three ranks, of one of two ranks, and of a single rank.
    assert_eq!([of("AND 0", 1), of("MOD 2", 1), of("MOD 3", 1)], ["4", "6", "12"]);
    assert_eq!(of("MOD 3", 7), "0.00");
}

#[test]
fn invalid_splits_are_rejected_before_a_rank_starts() {
    for (split, args, expected) in [
        ("MOD 0", "all_gather --nproc 2", "the divisor is 0"),
        ("XOR 1", "all_gather --nproc 2", "NCCL_TESTS_SPLIT is 'XOR 1'"),
        ("MOD 2", "sendrecv --nproc 3", "sendrecv needs two ranks or more in a group (--nproc N), not 2, 1"),
        ("DIV 2", "broadcast --nproc 4 -r 2", "--root 2 is not one of the 2 ranks of the smallest group"),
    ] {
        let output = bench_split(split, args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{split} {args}: {stderr}");
        assert!(stderr.contains(expected) && !stderr.contains("rank 0"), "{split} {args}: {stderr}");
    }
}

#[test]
fn unaligned_aggregated_and_blocking_calls_are_correct() {
    for collective in collectives(2) {
        check_rows(collective, "--nproc 2 -b 8 -e 100K -f 16 -n 2 -w 1 -u 3 -d half --timeout 60");
    }
    for collective in collectives(3) {
        check_rows(collective, "--nproc 3 -b 8 -e 100K -f 16 -n 2 -w 1 -m 4 -z 1 --timeout 60");
    }
}

#[test]
fn each_cycle_repeats_all_rows() {
    let rows = rows("all_gather --nproc 2 -b 1K -e 4K -f 4 -n 1 -w 0 -N 3 --timeout 60");
    assert_eq!(rows.iter().map(|row| row[0].as_str()).collect::<Vec<_>>(), ["1024", "4096"].repeat(3));
}

/// The keys match the analysis scripts of nccl-tests.
#[test]
fn each_iteration_is_reported_in_columns_and_in_json() {
    let path =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("iterations-{}.json", std::process::id()));
    let output = bench(&format!(
        "all_reduce --nproc 2 -b 1K -e 1K -n 7 -w 1 -I 1 -K 2 -S 1 -M 1 -J {} --timeout 60",
        path.display()
    ));
    let stdout = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{stdout}");
    assert!(
        stdout.contains("i_min") && stdout.contains("i_cv%") && stdout.contains("# Memory of a rank, MiB")
    );
    let row = stdout.lines().find(|line| !line.starts_with('#')).unwrap();
    // 13 columns, four more in each half, a date and a time.
    assert_eq!(row.split_whitespace().count(), 13 + 8 + 2, "{row}");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let json: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(json["config"]["per_iter_skip"], 2);
    for half in ["out_of_place_per_iter", "in_place_per_iter"] {
        let statistics = &json["results"][0][half];
        let of = |list: &serde_json::Value| -> Vec<f64> {
            list.as_array().unwrap().iter().map(|time| time.as_f64().unwrap()).collect()
        };
        let (times, ranks) =
            (of(&statistics["times_us"]), statistics["per_process_max_times_us"].as_array().unwrap());
        assert_eq!((times.len(), ranks.len()), (7, 2));
        let ranks: Vec<Vec<f64>> = ranks.iter().map(of).collect();
        for (i, time) in times.iter().enumerate() {
            assert!((ranks[0][i].max(ranks[1][i]) - time).abs() < 1e-9);
        }
        let most = times[2..].iter().copied().fold(0.0, f64::max);
        assert!((statistics["max_us"].as_f64().unwrap() - most).abs() < 1e-9);
        assert!(
            statistics["min_us"].as_f64() <= statistics["avg_us"].as_f64()
                && statistics["p99_us"].as_f64() <= Some(most)
        );
        assert!(statistics["cv_pct"].as_f64().is_some_and(|cv| cv >= 0.0));
    }
}

#[test]
fn unchecked_rows_are_not_reported_as_correct() {
    let rows = rows("all_gather --nproc 2 -b 1K -e 1K -n 1 -w 0 -c 0 --timeout 60");
    assert_eq!((rows[0][8].as_str(), rows[0][12].as_str()), ("N/A", "N/A"));
}

/// Starts two ranks with torchrun's environment and rendezvous port `port`. Returns their outputs.
fn started_by_torchrun(port: u16) -> Vec<Output> {
    let rank = |rank: usize| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_smddp-bench"));
        command.args("all_reduce -b 1K -e 1K -n 1 -w 0 --timeout 60".split(' '));
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.env("WORLD_SIZE", "2").env("LOCAL_WORLD_SIZE", "2");
        command.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", (port - 1).to_string());
        command.env("TORCHELASTIC_USE_AGENT_STORE", "True");
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut ranks = vec![rank(0), rank(1)];
    let mut outputs = vec![ranks.remove(0).wait_with_output().unwrap()];
    let mut other = ranks.remove(0);
    if !outputs[0].status.success() {
        other.kill().unwrap();
    }
    outputs.push(other.wait_with_output().unwrap());
    outputs
}

#[test]
fn torchruns_environment_is_sufficient() {
    // Another program may take the free port first; then the next attempt uses another port.
    for _ in 0..5 {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let outputs = started_by_torchrun(port);
        let stderr = String::from_utf8_lossy(&outputs[0].stderr);
        if stderr.contains("choose another port") {
            continue;
        }
        assert!(outputs.iter().all(|o| o.status.success()), "{stderr}");
        assert!(String::from_utf8_lossy(&outputs[0].stdout).contains("# Out of bounds values : 0 OK"));
        assert!(outputs[1].stdout.is_empty(), "only rank 0 prints");
        return;
    }
    panic!("no port stayed free long enough");
}

/// Returns the rows of a successful OSU test, in which all checks passed.
fn osu_rows(args: &str, figures: usize) -> Vec<Vec<f64>> {
    let output = bench(args);
    let stdout = String::from_utf8(output.stdout).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args}: {}\n{stdout}\n{stderr}", output.status);
    assert!(stdout.contains("\n# Out of bounds values : 0 OK\n"), "{args}\n{stdout}");
    let row = |line: &str| {
        let line = line.strip_suffix("Pass").unwrap_or_else(|| panic!("{args}: {line}"));
        let row: Vec<f64> = line.split_whitespace().map(|figure| figure.parse().unwrap()).collect();
        assert_eq!(row.len(), 1 + figures, "{args}: {line}");
        row
    };
    stdout.lines().filter(|line| !line.starts_with('#')).map(row).collect()
}

#[test]
fn messages_between_pairs_are_timed_and_checked() {
    for (test, figures) in [("latency", 1), ("bw", 1), ("bibw", 1), ("message_rate", 2)] {
        for run in ["--nproc 2 -W 5", "--nproc 4 -W 64"] {
            // The last size has more concurrent messages than receive slots.
            let rows =
                osu_rows(&format!("{test} {run} -b 0 -e 600K -f 600 -n 3 -w 1 -c 2 --timeout 60"), figures);
            assert_eq!(
                rows.iter().map(|row| row[0]).collect::<Vec<_>>(),
                [0.0, 1.0, 600.0, 360_000.0, 614_400.0]
            );
            // Small messages on a busy machine may round to 0.00 MB/s.
            assert!(rows[3..].iter().all(|row| row[1] > 0.0), "{test} {run}: {rows:?}");
        }
    }
    // The message rate is consistent with the bandwidth.
    for row in osu_rows("osu_mbw_mr --nproc 2 -b 1000 -e 4000 -n 5 --timeout 60", 2) {
        assert!((row[1] * 1e6 / row[0] - row[2]).abs() <= row[2] * 1e-2 + 1e4 / row[0], "{row:?}");
    }
}

#[test]
fn message_percentiles_are_ordered_and_compare_reads_the_file() {
    let path =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("latency-{}.json", std::process::id()));
    let file = path.display();
    for row in osu_rows(&format!("latency --nproc 2 -e 64 -f 8 -n 50 -I 1 -K 5 -J {file} --timeout 60"), 6) {
        assert!(row[2..].is_sorted() && row[2] > 0.0, "{row:?}");
    }
    let json: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    assert_eq!((&json["collective"], &json["config"]["has_in_place"]), (&"latency".into(), &false.into()));
    let row = &json["results"][1];
    assert!(row["mb_per_s"].as_f64() > Some(0.0) && row["messages_per_s"].as_f64() > Some(0.0), "{row}");
    assert_eq!(row["out_of_place_per_iter"]["per_process_max_times_us"].as_array().map(Vec::len), Some(1));
    let compared = bench(&format!("compare {file} {file}"));
    std::fs::remove_file(&path).unwrap();
    assert!(compared.status.success() && String::from_utf8_lossy(&compared.stdout).contains("3 the same"));
}

#[test]
fn overlapped_collectives_are_correct() {
    for collective in [
        "iall_gather",
        "ireduce_scatter",
        "osu_iallreduce",
        "osu_ibcast",
        "ireduce",
        "igather",
        "iscatter",
        "iall_to_all",
    ] {
        for ranks in [2, 3] {
            let args = format!("{collective} --nproc {ranks} -b 12 -e 100K -f 90 -n 5 -w 1 --timeout 60");
            for row in osu_rows(&args, 4) {
                assert!(
                    row[1..4].iter().all(|us| *us > 0.0) && (0.0..=100.0).contains(&row[4]),
                    "{args}: {row:?}"
                );
            }
        }
    }
    let barrier = bench("ibarrier --nproc 2 -n 5 --timeout 60");
    let stdout = String::from_utf8_lossy(&barrier.stdout);
    assert!(
        barrier.status.success() && stdout.lines().any(|line| line.starts_with('0') && line.ends_with("N/A"))
    );
}
