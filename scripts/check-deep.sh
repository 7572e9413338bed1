#!/usr/bin/env bash
# What takes longer than a test may: loom's models of the shared words, and libFuzzer over everything that comes from outside.
#
#   FUZZ_SECONDS=60   for each target        FUZZ_TARGETS="tcp shm"   instead of all
#
# What a run of a target finds on its way is kept in fuzz/grown; an input that fails lies in fuzz/artifacts, and
# `cargo +nightly fuzz run --fuzz-dir fuzz TARGET FILE` runs it again.
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
# The longest of them tries some hundred thousand orders.
cargo test --quiet --manifest-path models/Cargo.toml

targets=${FUZZ_TARGETS:-$(cargo +nightly fuzz list --fuzz-dir fuzz)}
# shellcheck disable=SC2086 # one word each
cargo +nightly fuzz build --fuzz-dir fuzz
failed=()
for target in $targets; do
    echo "== $target, $seconds s"
    mkdir -p "fuzz/grown/$target" "fuzz/artifacts/$target"
    log=fuzz/artifacts/$target.log
    # Nothing here waits for anybody: twenty seconds are a hang, whatever else the machine does.
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
            tail -n 5 "fuzz/artifacts/$target.log" >&2 # not built, say
    done
    exit 1
fi
echo "nothing found"
