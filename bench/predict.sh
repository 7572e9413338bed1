#!/usr/bin/env bash
# Holds `smddp-bench simulate` against real runs of 2 to 8 ranks on shaped links, and prints a
# table. Calibrates a cluster file from the bare links first; see bench/predict.py, whose options it takes.
# Root; about a minute and a half, in which nothing else should run. VENV: where smddp-bench is, if not in PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PATH:${VENV:-$PWD/.venv}/bin"
out=target/bench/predict
mkdir -p "$out"
bench/lab/quiet --rt python3 bench/predict.py --out "$out" "$@" | tee "$out/table.md"
