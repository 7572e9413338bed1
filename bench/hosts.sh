#!/usr/bin/env bash
# Measures smddp against gloo, Open MPI, MPICH and Intel MPI between "hosts" made of network namespaces whose links are
# shaped to 1 Gbit/s, and prints the table of its run. `make bench-hosts` calls it.
#
#   bench/hosts.sh             everything (about twenty minutes; nothing else should run meanwhile)
#   bench/hosts.sh quick       one case, three rounds: does the tooling work?
#   bench/hosts.sh 2x1 fsdp    these parts only: 2x1 4x2 3x123 fsdp long
#
# Results are left in target/bench/hosts/. Settings: IMPLS (libraries, see bench/lab/peers/peers.json), ROUNDS, RATE,
# WAYS (round trips of the long links, as 10=5ms: the delay that makes 10 ms),
# PEERS (where the MPIs are, .peers), VENV (the environment with the wheel, .venv), RT=0 (ordinary scheduling, for those
# who are not root; small times then mean little) or RT=fair (ordinary scheduling in a control group ahead of all others).
set -euo pipefail
cd "$(dirname "$0")/.."

rate=${RATE:-1gbit}
impls=${IMPLS:-gloo,smddp-core,openmpi5,mpich5,impi}
venv=${VENV:-$PWD/.venv}
out=target/bench/hosts
[ "${1:-}" != quick ] || out=$out-quick
lab=bench/lab
export PATH="$PATH:$venv/bin" PEERS=${PEERS:-$PWD/.peers} OMP_NUM_THREADS=1
export WORKER="$PWD/target/release/smddp-bench"

quiet=("$lab/quiet" --rt)
if [ "${RT:-1}" = 0 ]; then
    quiet=()
elif [ "${RT:-1}" = fair ]; then
    quiet=("$lab/quiet")
elif ! "${quiet[@]}" true 2>/dev/null; then
    echo "hosts.sh: real-time scheduling is refused: run as root, or with RT=0 for rough figures" >&2
    exit 1
fi

mkdir -p "$out" "$PEERS"
case ,$impls, in *,smddp-core,*) cargo build --quiet --release -p smddp-bench --features lab ;; esac
[ -e "$PEERS/.gitignore" ] || echo '*' >"$PEERS/.gitignore"
case ,$impls, in *,openmpi5,* | *,mpich5,* | *,impi,*) sh "$lab/peers/setup-peers.sh" "$PEERS" ;; esac

# MPICH spins without yielding: with more ranks than cores its figures are the scheduler's.
crowd=$(tr , '\n' <<<"$impls" | grep -v '^mpich' | paste -sd,)

collective() { # NAME HOSTS PROCS OPS SIZES LIBRARIES [OPTION OF peers.py]
    "${quiet[@]}" "$lab/netlab" up --hosts "$2" --rate "$rate" ${delay:+--delay "$delay"} -- \
        "$venv/bin/python" "$lab/peers/peers.py" --procs "$3" --impls "$6" --ops "$4" --sizes "$5" \
        --rounds "$rounds" --pause 0.5 --case-s "${case_s:-6}" ${7:-} --json "$out/$1.json" | tee "$out/$1.txt"
}

# A waiting call's thread has to run beside the computation's: real-time turns of 100 ms would hold it up.
training() { # NAME FORMAT OPTION of fsdp_bench.py...
    SMDDP_WIRE_FORMAT=$2 "$lab/quiet" "$lab/netlab" run --hosts 2 --rate "$rate" --raw -- \
        "$venv/bin/python" "$lab/peers/fsdp_bench.py" "${@:3}" --steps 7 --warmup 2 | tee "$out/fsdp-$1.txt"
}

failed=0
part() {
    case $1 in
        quick) rounds=3 collective 2x1-quick 2 1 all_gather 1k,1m "$impls" || failed=1 ;;
        2x1)
            for op in all_gather reduce_scatter all_reduce; do
                collective "2x1-$op" 2 1 "$op" 1k,1m,16m "$impls" || failed=1
            done ;;
        4x2)
            for op in all_gather reduce_scatter all_reduce; do
                collective "4x2-$op" 4 2 "$op" 1m,16m "$crowd" || failed=1
            done ;;
        3x123)
            # Most launchers take one number of ranks for all hosts.
            collective 3x123 3 1,2,3 all_gather,reduce_scatter,all_reduce 16m smddp-core || failed=1 ;;
        long)
            # Round trips in milliseconds; the switch behind --delay adds 0.1 to twice the delay. What the line carries is
            # measured on the shortest: its probe goes to and fro many times.
            for way in ${WAYS:-0.1=5us 1=450us 10=5ms 50=25ms}; do
                limit=--no-limit
                [ "${way%=*}" != 0.1 ] || limit=
                for hosts in 2 4; do
                    delay=${way#*=} case_s=12 rounds=${ROUNDS:-7} collective "long-${way%=*}ms-${hosts}x1" $hosts 1 \
                        all_gather,reduce_scatter,all_reduce 16m,64m gloo,smddp-core $limit || failed=1
                done
            done ;;
        fsdp)
            training gloo "" --backend gloo || failed=1
            training gloo-overlapped "" --backend gloo --overlap || failed=1
            training smddp "" --backend smddp || failed=1
            training overlapped "" --backend smddp --overlap || failed=1
            training bf16 bf16 --backend smddp --overlap || failed=1
            training int8 bf16,reduce_scatter=int8 --backend smddp --overlap || failed=1 ;;
        *) echo "hosts.sh: no such part: $1" >&2; exit 2 ;;
    esac
}

rounds=${ROUNDS:-21}
[ $# -gt 0 ] || set -- 2x1 4x2 3x123 fsdp long
for name; do part "$name"; done

echo
"$venv/bin/python" bench/hosts.py "$out" | tee "$out/table.md"
exit $failed
