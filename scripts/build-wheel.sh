#!/usr/bin/env bash
# Builds the wheel of this source tree, or of the one that $SOURCE names:
#
#   scripts/build-wheel.sh OUT [--portable [TARGET]] [MATURIN OPTIONS]
#
# --portable: for any Linux from glibc 2.28 on, as old as that of torch's own wheels. zig links against the symbols of that
# glibc. Its linker cannot take debug information alone away, and its C compiler adds some: it goes afterwards.
# TARGET: a platform by Rust's name, such as aarch64-unknown-linux-gnu, instead of this machine's.
#
# The same commit gives the same bytes in whatever folder and for whomever: paths of this machine, which panic messages would
# have in them, are replaced, and maturin writes no dates.
set -euo pipefail
out=$(realpath --canonicalize-missing "$1")
shift
tools=$(realpath "$(dirname "$0")")
cd "${SOURCE:-$tools/..}"
portable=
# A wheel appears in OUT when it is whole; those of other platforms stay there.
built=$(mktemp -d)
trap 'rm -rf "$built"' EXIT
options=(--profile wheel --out "$built")
if [ "${1:-}" = --portable ]; then
    shift
    portable=1
    options+=(--zig --compatibility manylinux_2_28)
    export CARGO_PROFILE_WHEEL_STRIP=none
    if [[ "${1:-}" == *-linux-* ]]; then
        target=$1
        shift
        # By the same way as without a name, or the bytes might differ.
        if [ "${target%%-*}" != "$(uname -m)" ]; then
            if [ ! -d "$(rustc --print target-libdir --target "$target")" ]; then
                echo "missing: Rust's standard library for $target, in $(rustc --print sysroot)" >&2
                echo "    install it with: rustup target add $target" >&2
                exit 1
            fi
            options+=(--target "$target")
        fi
    fi
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
# Symbol names without a hash in each: the wheel is 50 KB smaller, and backtraces show generic arguments.
flags+=$'\x1f'-Csymbol-mangling-version=v0
export CARGO_ENCODED_RUSTFLAGS=$flags

# 100 KB (3 %) smaller than by the usual level, for two seconds.
maturin build --compression-level 9 "${options[@]}" "$@"
python3 "$tools/strip_wheel.py" "$built"/smddp-*.whl
mkdir -p "$out"
mv "$built"/smddp-*.whl "$out"
