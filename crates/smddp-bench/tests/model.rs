//! Tests of the commands `simulate`, `explain` and `tune`.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::PathBuf;
use std::process::{Command, Output};

use smddp_plan::tune::MemoryKind;

fn bench(args: &str) -> Output {
    bench_with(args, &[])
}

fn bench_with(args: &str, settings: &[(&str, &String)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_smddp-bench"));
    for name in ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"] {
        command.env_remove(name);
    }
    command.envs(settings.iter().map(|(name, value)| (*name, value.as_str())));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).args(args.split_whitespace()).output().unwrap()
}

/// Returns the standard output of a successful run.
fn printed(args: &str) -> String {
    printed_with(args, &[])
}

fn printed_with(args: &str, settings: &[(&str, &String)]) -> String {
    let output = bench_with(args, settings);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args}: {}\n{stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn invalid_command_lines_are_one_line_with_the_remedy() {
    for (args, status, expected) in [
        ("simulate all_gather --best --nodes 1024", 2, "name one with --algorithm (hier, "),
        ("simulate all_gather --nodes 2 --json /proc/x", 1, "writing /proc/x: "),
        ("explain all_gather --draw /no/such/x.svg", 1, "writing /no/such/x.svg: "),
        ("all_gather -np 2", 2, "--nproc N starts N ranks"),
        (
            "completion powershell",
            2,
            "[possible values: bash, zsh, fish] (see smddp-bench completion --help)",
        ),
        ("compare a.json", 2, "not provided: <B.json> (see smddp-bench compare --help)"),
        ("compare /no/a.json /no/b.json", 2, "reading /no/a.json: No such file"),
        ("replay /no/a.json", 2, "/no/a.json is not a dump: No such file"),
    ] {
        let output = bench(args);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), text.lines().count()), (Some(status), 1), "{args}: {text}");
        assert!(text.starts_with("smddp-bench") && text.contains(expected), "{args}: {text}");
    }
}

/// A temporary file of the test, removed on drop.
struct Temporary(PathBuf);

impl Temporary {
    fn new(name: &str) -> Temporary {
        let name = format!("model-{}-{name}", std::process::id());
        Temporary(PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name))
    }
    fn path(&self) -> String {
        self.0.display().to_string()
    }
    fn text(&self) -> String {
        std::fs::read_to_string(&self.0).unwrap()
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn simulate_labels_its_figures_and_writes_its_rows() {
    let (json, plot) = (Temporary::new("rows.json"), Temporary::new("plot.svg"));
    let text = printed(&format!(
        "simulate all_gather --cluster p4d --nodes 2,5 --bytes 1M,16M -J {} --plot {}",
        json.path(),
        plot.path()
    ));
    assert!(text.contains("every figure is simulated"), "{text}");
    assert_eq!(text.lines().filter(|line| !line.starts_with('#')).count(), 4, "{text}");
    let json: serde_json::Value = serde_json::from_str(&json.text()).unwrap();
    let rows = json["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for row in rows {
        let (nodes, bytes) = (row["nodes"].as_u64().unwrap(), row["bytes"].as_u64().unwrap());
        assert_eq!((&row["collective"], &row["cluster"]), (&"all_gather".into(), &"p4d".into()));
        assert_eq!((&row["simulated"], row["ranks"].as_u64()), (&true.into(), Some(8 * nodes)));
        assert!(row["algorithm"].as_str().unwrap().starts_with("hier"), "{row}");
        assert!(row["time_us"].as_f64().unwrap() > 0.0);
        assert!((0.0..=1.0).contains(&row["line_share"].as_f64().unwrap()), "{row}");
        // (N-1)/N of the buffer, minus the remainder of a division into blocks.
        let most = bytes * (nodes - 1) / nodes;
        let link = row["link_bytes"].as_u64().unwrap();
        assert!((most - 4 * 8 * nodes..=most).contains(&link), "{row}");
    }
    let plot = plot.text();
    assert!(plot.starts_with("<svg ") && plot.contains("(simulated)") && plot.contains("polyline"));
}

#[test]
fn simulate_supports_cluster_files_algorithms_and_segments() {
    let file = "--cluster ../../docs/clusters/example.toml";
    let text = printed(&format!("simulate all_reduce {file} --bytes 1M --algorithm ring,mesh --segment 32K"));
    let rows: Vec<Vec<&str>> =
        text.lines().filter(|l| !l.starts_with('#')).map(|l| l.split_whitespace().collect()).collect();
    let of = |column: usize| rows.iter().map(|row| row[column]).collect::<Vec<_>>();
    assert_eq!((of(1), of(2), of(4)), (vec!["4", "4"], vec!["8", "8"], vec!["hier-ring", "mesh"]));
    assert_eq!(of(5), ["32K", "32K"]);
    // The override may be for a node beyond the selected number of nodes.
    assert!(printed(&format!("simulate all_gather {file} --nodes 2 --bytes 1M")).contains(" 2 "));
}

#[test]
fn explain_names_the_plan_its_reason_and_the_candidates() {
    let draw = Temporary::new("plan.svg");
    let command =
        format!("explain all_gather --bytes 16M --nodes 4 --ppn 8 --cluster p4d --draw {}", draw.path());
    let text = printed(&command);
    for part in ["plan: hier", "segments of", "simulated:", "critical path:", "candidates", "rank 0:", "ring"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    let draw = draw.text();
    assert!(draw.starts_with("<svg ") && draw.contains("node 3 rank 24") && draw.ends_with("</svg>\n"));
    let one = printed("explain all_reduce --bytes 1M --ppn 4");
    assert!(one.contains("plan: mesh") && one.contains("share memory"), "{one}");
    let arguments = printed("explain all_gather --bytes 1M --nodes 3 --ppn 2 --algorithm hier-ring");
    assert!(
        arguments.contains("plan: hier-ring") && arguments.contains("requested by --algorithm"),
        "{arguments}"
    );
}

/// Tests several settings, and sizes with mostly empty blocks.
#[test]
fn explain_and_simulate_name_the_same_plan() {
    let file = Temporary::new("tune.txt");
    std::fs::write(&file.0, "all_gather:1m-inf:@hier-log\n").unwrap();
    let (tune, cut, algorithm) = (file.path(), "32K".to_owned(), "hier-ring".to_owned());
    for settings in
        [vec![], vec![("SMDDP_TUNE", &tune)], vec![("SMDDP_SEGMENT_BYTES", &cut), ("SMDDP_ALGO", &algorithm)]]
    {
        for (collective, cluster, nodes, bytes) in [
            ("all_gather", "p4d", 4, "16M"),
            ("all_gather", "sockets --ppn 2", 4, "1000"),
            ("all_reduce", "p5", 3, "256M"),
            ("all_reduce", "sockets --ppn 8", 16, "64"),
            ("broadcast", "sockets --ppn 2", 5, "3M"),
            ("all_to_all", "p4d", 2, "1M"),
        ] {
            let arguments = format!("{collective} --cluster {cluster} --nodes {nodes} --bytes {bytes}");
            let explained = printed_with(&format!("explain {arguments}"), &settings);
            let plan = explained.lines().find_map(|line| line.strip_prefix("plan: ")).unwrap();
            let simulated = printed_with(&format!("simulate {arguments}"), &settings);
            let row = simulated.lines().find(|line| !line.starts_with('#')).unwrap();
            let columns: Vec<&str> = row.split_whitespace().collect();
            let named = format!("{}, segments of {},", columns[4], columns[5]);
            assert!(plan.starts_with(&named), "{arguments} {settings:?}: {plan}, but {row}");
        }
    }
}

#[test]
fn tune_writes_a_table_that_can_be_loaded() {
    let file = Temporary::new("table.txt");
    printed(&format!(
        "tune all_gather broadcast --nproc 2 --algorithm mesh,ring -b 4K -e 256K -f 8 -n 2 -w 1 -T 60 -o {}",
        file.path()
    ));
    let table = smddp_plan::tune::Table::parse(&file.text()).unwrap();
    for collective in [smddp_plan::Collective::AllGather, smddp_plan::Collective::Broadcast] {
        for bytes in [0, 64 << 10, 1 << 40] {
            let of = |place, ranks| table.algorithm(collective, bytes, place, ranks);
            assert!(of(MemoryKind::Host, 2).is_some(), "{}", file.text());
            // The table has no entries for unmeasured cases.
            assert_eq!((of(MemoryKind::Host, 3), of(MemoryKind::Cuda, 2)), (None, None));
        }
    }
    assert!(!file.text().contains("bits"), "{}", file.text());
}

#[test]
fn only_the_rank_that_writes_the_table_checks_its_file() {
    let args = "tune all_gather -b 8 -e 8 -n 1 -w 0 -T 1 -o /proc/x";
    let failure = |rank: &str| {
        // The measurement of rank 1 fails at once.
        let values = [("RANK", rank), ("WORLD_SIZE", "2"), ("SMDDP_TRANSPORT", "unknown")]
            .map(|(n, v)| (n, v.to_owned()));
        let address = [("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", "1".to_owned())];
        let settings: Vec<_> = values.iter().chain(&address).map(|(name, value)| (*name, value)).collect();
        String::from_utf8(bench_with(args, &settings).stderr).unwrap()
    };
    assert!(failure("0").contains("writing /proc/x: "), "{}", failure("0"));
    assert!(failure("1").contains("measuring all_gather with default failed"), "{}", failure("1"));
}

#[test]
fn tune_warns_that_reductions_may_change() {
    let output = bench("tune all_reduce --reducing --nproc 2 --algorithm mesh -b 64K -e 64K -n 1 -w 0 -T 60");
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("bits") && stdout.contains("bits"), "{stdout} {stderr}");
    assert!(stdout.contains("all_reduce:0-inf:host:[2]:@mesh"), "{stdout}");
}

#[test]
fn invalid_arguments_are_rejected_with_status_2() {
    let broken = Temporary::new("broken.toml");
    std::fs::write(&broken.0, "ranks_per_node = 2\n[local]\nrate = \"fast\"\nlatency_us = 1\n").unwrap();
    let broken_file = format!("simulate all_gather --cluster {}", broken.path());
    for (args, expected) in [
        (broken_file.as_str(), "line 3"),
        ("simulate all_gather --cluster p6", "p4d, p5, sockets"),
        ("simulate all_gather --nodes 0", "nodes"),
        ("simulate all_gather --nodes 2 --algorithm hier-rign", "hier-ring"),
        ("simulate all_gather --nodes 2 --algorithm tree", "tree does not support all_gather"),
        ("simulate broadcast --nodes 2 --root 16", "--root 16"),
        ("simulate sendrecv --nodes 2", "sendrecv"),
        ("simulate all_gathers", "reduce_scatter"),
        ("explain all_gather --bytes 1M --nodes 2 --algorithm tree", "tree does not support"),
        ("tune all_reduce --nproc 2", "--reducing"),
        ("tune barrier --nproc 2", "no sizes"),
        ("tune all_gather --nproc 2 -b 2M -e 1M", "--minbytes"),
    ] {
        let output = bench(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args}: {stderr}");
        assert!(stderr.contains(expected), "{args}: {stderr}");
    }
}
