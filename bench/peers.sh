#!/usr/bin/env bash
# Measures smddp against gloo, Open MPI, MPICH and Intel MPI on this machine, all of them in turns, and
# prints the table of its run. `make bench-peers` calls it. Where matplotlib is, the figures are drawn, too.
#
#   bench/peers.sh            everything (about fifteen minutes; nothing else should run meanwhile)
#   bench/peers.sh quick      few sizes, three rounds: does the tooling work?
#
# Results are left in target/bench/. Settings: IMPLS (libraries, see bench/lab/peers/peers.json), ROUNDS,
# TRIES (how often a run is repeated whose core probe failed), CORE_NS (the probe's bar, 200),
# RT=0 (ordinary scheduling, for those who are not root; small times then mean little).
set -euo pipefail
cd "$(dirname "$0")/.."

mode=${1:-full}
impls=${IMPLS:-gloo,smddp,smddp-core,smddp-symmetric,openmpi5,mpich5,impi}
tries=${TRIES:-5}
python=$PWD/.venv/bin/python
out=target/bench
lab=bench/lab
export WORKER="$PWD/target/release/smddp-bench"
export PEERS="$PWD/.peers"
export OMP_NUM_THREADS=1

quiet=("$lab/quiet" --rt)
if [ "${RT:-1}" = 0 ]; then
    quiet=()
elif ! "${quiet[@]}" true 2>/dev/null; then
    echo "peers.sh: real-time scheduling is refused: run as root, or with RT=0 for rough figures" >&2
    exit 1
fi

mkdir -p "$out" "$PEERS"
case ,$impls, in *,smddp-core,* | *,smddp-symmetric,*) cargo build --quiet --release -p smddp-bench --features lab ;; esac
echo '*' >"$PEERS/.gitignore"
case ,$impls, in *,openmpi5,* | *,mpich5,* | *,impi,*) sh "$lab/peers/setup-peers.sh" "$PEERS" ;; esac
cc -O2 -pthread -o "$out/coredist" bench/coredist.c
rm -f "$out"/*.json "$out"/*.txt "$out"/*.log "$out/curves.svg"

near() { "${quiet[@]}" "$out/coredist" -t 0.5 -m "${CORE_NS:-200}" | tee -a "$out/probes.log"; }

# Cores that are far apart come together again by themselves, after seconds.
await_near() {
    local end=$((SECONDS + 60))
    until near; do
        ((SECONDS < end)) || return 1
        sleep 1
    done
}

# Runs a command between two probes of the cores' distance; repeats it when the second finds them far apart.
gated() {
    local try
    for ((try = 1; try <= tries; try++)); do
        if await_near && "$@" && near; then return 0; fi
        echo "# rejected ($try of $tries)" | tee -a "$out/probes.log"
    done
    echo "# given up after $tries tries: $*" | tee -a "$out/probes.log" >&2
    return 1
}

collective() { # NAME RANKS OPS SIZES [LIBRARIES]
    "${quiet[@]}" "$python" "$lab/peers/peers.py" --procs "$2" --impls "${5:-$impls}" --ops "$3" --sizes "$4" \
        --rounds "$rounds" --pause 0.5 --json "$out/$1.json"
}

training() { # BACKEND [OPTION of fsdp_bench.py]
    "${quiet[@]}" "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$lab/peers/fsdp_bench.py" \
        --backend "$@" --steps 7 --warmup 2 | tee "$out/fsdp-$1${2:-}.txt"
}

failed=0
if [ "$mode" = quick ]; then
    rounds=${ROUNDS:-3}
    gated collective n2-all_gather 2 all_gather 1k,256k || failed=1
    gated collective n4-reduce_scatter 4 reduce_scatter 256k || failed=1
else
    rounds=${ROUNDS:-21}
    for op in all_gather reduce_scatter all_reduce; do
        gated collective "n2-$op" 2 "$op" 8,1k,16k,256k,4m,64m || failed=1
    done
    for op in all_gather reduce_scatter; do
        gated collective "n4-$op" 4 "$op" 256k,1m,4m,64m || failed=1
    done
    # MPICH's all_reduce of more ranks than cores takes seconds a call: it spins without yielding.
    crowd=$(tr , '\n' <<<"$impls" | grep -v '^mpich' | paste -sd,)
    gated collective n4-all_reduce 4 all_reduce 256k,1m,4m "$crowd" || failed=1
    for backend in gloo smddp; do
        case ,$impls, in *,$backend,*) gated training "$backend" || failed=1 ;; esac
    done
    case ,$impls, in *,smddp-symmetric,*) gated training smddp --symmetric || failed=1 ;; esac
fi

echo
"$python" bench/ratios.py "$out" | tee "$out/table.md"
if "$python" -c 'import matplotlib' 2>/dev/null; then
    "$python" bench/curves.py "$out" "$out/curves.svg" || failed=1
else
    echo "# not drawn: matplotlib is not installed; \`make bench-curves\` installs it and draws these figures" >&2
fi
exit $failed
