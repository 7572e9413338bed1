//! Tests of the shell completion and the manual pages.

#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::Path;
use std::process::{Command, Output};

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_smddp-bench")).args(args).output().unwrap()
}

fn printed(args: &[&str]) -> String {
    let output = bench(args);
    assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Returns bash's completions at the end of a line.
fn completions(line: &str) -> Vec<String> {
    let words: Vec<&str> = line.split(' ').collect();
    let (last, before) = (words[words.len() - 1], words[words.len() - 2]);
    let request = format!(
        "COMP_WORDS=({line}); COMP_CWORD={}; _smddp__bench smddp-bench '{last}' '{before}'; echo \"${{COMPREPLY[@]}}\"",
        words.len() - 1
    );
    let script = printed(&["completion", "bash"]) + &request;
    let output = Command::new("bash").args(["--norc", "-c", &script]).output().unwrap();
    String::from_utf8(output.stdout).unwrap().split_whitespace().map(str::to_owned).collect()
}

#[test]
fn bash_completes_measurements_options_and_values() {
    assert_eq!(completions("smddp-bench all_"), ["all_gather", "all_reduce", "all_to_all"]);
    assert_eq!(completions("smddp-bench sim"), ["simulate"]);
    assert_eq!(completions("smddp-bench latency --wi"), ["--window"]);
    assert_eq!(completions("smddp-bench all_reduce -d bf"), ["bfloat16"]);
    assert_eq!(completions("smddp-bench compare --pl"), ["--plot"]);
    assert_eq!(completions("smddp-bench completion z"), ["zsh"]);
    // Includes options of Python's console command, and excludes options that are hidden from --help.
    assert_eq!(completions("smddp-bench all_gather --to"), ["--torch"]);
    assert_eq!(completions("smddp-bench all_gather --st"), ["--stepfactor", "--stepbytes"]);
}

#[test]
fn other_shells_have_the_same_names_and_options() {
    for shell in ["zsh", "fish"] {
        let script = printed(&["completion", shell]);
        for word in
            ["all_gather", "message_rate", "iall_reduce", "simulate", "torch", "plot", "nproc", "bfloat16"]
        {
            assert!(script.contains(word), "{shell}: {word}");
        }
        assert!(!script.contains("cta_policy"), "{shell}");
    }
}

#[test]
fn manual_has_a_page_of_the_program_and_of_each_subcommand() {
    let page = printed(&["man"]);
    for words in [".TH smddp-bench 1", "\\-\\-warmup_iters", "\\-\\-torch", "NCCL_TESTS_SPLIT", "Exit status"]
    {
        assert!(page.contains(words), "{words}");
    }
    assert!(printed(&["man", "tune"]).contains("\\-\\-reducing"));
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("pages-{}", std::process::id()));
    std::fs::create_dir(&folder).unwrap();
    printed(&["man", "--to", folder.to_str().unwrap()]);
    for name in ["", "-simulate", "-explain", "-tune", "-compare", "-replay", "-completion", "-man"] {
        let text = std::fs::read_to_string(folder.join(format!("smddp-bench{name}.1"))).unwrap();
        assert!(text.contains(&format!(".TH smddp-bench{name} 1")), "{name}");
    }
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn unknown_pages_and_shells_are_rejected_with_the_choices() {
    for (args, expected) in [
        (["man", "tuning"], "simulate, explain, tune"),
        (["completion", "csh"], "bash"),
        (["man", "--to"], "FOLDER"),
    ] {
        let output = bench(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(expected), "{args:?}");
    }
}
