#!/usr/bin/env bash
# Builds the wheel of this source tree, or of the one that $SOURCE names:
#
#   scripts/build-wheel.sh OUT [--portable] [MATURIN OPTIONS]
#
# --portable: for any Linux from glibc 2.28 on, as old as that of torch's own wheels. zig links against the symbols of that
# glibc. Its linker cannot take debug information alone away, and its C compiler adds some: it goes afterwards.
#
# The same commit gives the same bytes in whatever folder and for whomever: paths of this machine, which panic messages would
# have in them, are replaced, and maturin writes no dates.
set -euo pipefail
out=$(realpath --canonicalize-missing "$1")
shift
tools=$(realpath "$(dirname "$0")")
cd "${SOURCE:-$tools/..}"
portable=
options=(--release --out "$out")
if [ "${1:-}" = --portable ]; then
    shift
    portable=1
    options+=(--zig --compatibility manylinux_2_28)
    export CARGO_PROFILE_RELEASE_STRIP=none
fi

# The last that fits is taken: a Cargo home may be inside the tree.
remaps=(
    "$PWD=/smddp"
    "${CARGO_HOME:-$HOME/.cargo}=/cargo"
    "$(rustc --print sysroot)/lib/rustlib/src/rust=/rustc"
)
# Encoded, since paths may have spaces. What the caller wants of rustc stays.
flags=${CARGO_ENCODED_RUSTFLAGS:-}
[ -n "$flags" ] || flags=$(tr -s ' ' '\037' <<<"${RUSTFLAGS:-}" | tr -d '\n')
for remap in "${remaps[@]}"; do
    flags+=${flags:+$'\x1f'}--remap-path-prefix=$remap
done
export CARGO_ENCODED_RUSTFLAGS=$flags

maturin build "${options[@]}" "$@"
[ -z "$portable" ] || python "$tools/strip_wheel.py" "$out"/smddp-*.whl
