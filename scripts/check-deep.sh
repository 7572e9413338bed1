#!/usr/bin/env bash
# Checks that take longer than a test may: loom's models of shared memory, ownership of the engine, abort and the job gate, and libFuzzer
# over all input from outside.
#
#   FUZZ_SECONDS=60   seconds for each target        FUZZ_TARGETS="tcp shm"   targets, instead of all
#
# New inputs that reach more code are kept in fuzz/grown, failing inputs in fuzz/artifacts.
# `cargo +nightly fuzz run --fuzz-dir fuzz TARGET FILE` runs one again.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${FUZZ_SECONDS:-60}
tools=$PWD/.deep
export PATH=$tools/bin:$PATH

if ! rustc +nightly --version >/dev/null 2>&1; then
    echo "missing: a nightly toolchain of Rust, for libFuzzer's instrumentation" >&2
    echo "    install it with: rustup toolchain install nightly --profile minimal" >&2
    exit 1
fi
if ! command -v cargo-fuzz >/dev/null 2>&1; then
    cargo install cargo-fuzz --locked --root "$tools"
fi

echo "== models"
# The longest model tries several hundred thousand orders.
cargo test --quiet --manifest-path models/Cargo.toml

targets=${FUZZ_TARGETS:-$(cargo +nightly fuzz list --fuzz-dir fuzz)}
# shellcheck disable=SC2086 # one word each
cargo +nightly fuzz build --fuzz-dir fuzz
failed=()
for target in $targets; do
    echo "== $target, $seconds s"
    mkdir -p "fuzz/grown/$target" "fuzz/artifacts/$target"
    log=fuzz/artifacts/$target.log
    # No target waits for another process, so 20 s for one input are a hang, also under load.
    cargo +nightly fuzz run --fuzz-dir fuzz "$target" "fuzz/grown/$target" "fuzz/corpus/$target" -- \
        -max_total_time="$seconds" -timeout=20 -rss_limit_mb=4096 -max_len=2048 -print_final_stats=1 \
        >"$log" 2>&1 || failed+=("$target")
    awk '/^#[0-9]+/ { cov = $0 } /stat::number_of_executed_units/ { runs = $2 }
         END { sub(/^.*cov: /, "", cov); sub(/ .*$/, "", cov); printf "   %d runs, %d edges\n", runs, cov }' "$log"
done
if [ ${#failed[@]} -gt 0 ]; then
    for target in "${failed[@]}"; do
        echo "FOUND by $target:" >&2
        grep -aE 'panicked at|ERROR: |Test unit written' -A1 "fuzz/artifacts/$target.log" | head -12 >&2 ||
            tail -n 5 "fuzz/artifacts/$target.log" >&2 # for example a failed build
    done
    exit 1
fi
echo "nothing found"
