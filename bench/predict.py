"""The simulator held against real runs on shaped links: how far off is it?

Measures the bare links of a netlab (bench/lab/peers/linkprobe.c: the rate with all links busy; bench/lab/rawtcp.c: a
round trip of spinning sockets) and how quickly memory is copied, writes a cluster file with those figures, runs the
collectives, and replays the plan that each of them used on that cluster. bench/predict.sh calls it.

  bench/predict.py --out target/bench/predict [--rate 1gbit] [--shapes 2x1,2x2,4x1,4x2] [--ops ...] [--sizes 1M,4M,16M]
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAB = HERE / "lab"
NETLAB = str(LAB / "netlab")
PORT = "28778"
GOAL = 0.20


def run(cmd: list, **kw) -> str:
    return subprocess.run([str(c) for c in cmd], capture_output=True, text=True, check=True, **kw).stdout


def copy_rate() -> float:
    """Bytes a second of a copy that leaves the caches."""
    source, best = bytearray(os.urandom(1 << 20)) * 32, 0.0
    target = bytearray(len(source))
    for _ in range(7):
        begun = time.perf_counter()
        target[:] = source
        best = max(best, len(source) / (time.perf_counter() - begun))
    return best


def probe(tools: Path) -> dict:
    """Inside `netlab up`: round trip and rate of bare sockets."""
    hosts = int(os.environ["NETLAB_HOSTS"])
    addresses = [f"10.77.0.{i + 1}" for i in range(hosts)]
    on = lambda host, *cmd: [NETLAB, "exec", f"h{host}", "--", *map(str, cmd)]  # noqa: E731
    probes = [
        subprocess.Popen(on(i, tools / "linkprobe", i, hosts, 2, *addresses), stdout=subprocess.PIPE, text=True)
        for i in range(hosts)
    ]
    rows = [p.communicate(timeout=60)[0].split() for p in probes]
    server = subprocess.Popen(on(1, tools / "rawtcp", "serve", PORT), env={**os.environ, "PIN": "1"})
    try:
        call = on(0, tools / "rawtcp", "pingpong", addresses[1], PORT, 8, 3000, "spin")
        half = float(run(call, env={**os.environ, "PIN": "0"}).split()[3])
    finally:
        server.terminate()
        server.wait()
    return {"gbit": min(float(r[3]) for r in rows), "half_us": half}


def cluster(folder: Path, links: dict, memory: float) -> Path:
    path = folder / "lab.toml"
    half = links["half_us"]
    # A write and a read of spinning sockets are most of that half round trip; there is no wire. The halves are a
    # message's cost at one end and its latency.
    path.write_text(
        f'name = "lab"\nranks_per_node = 1\nmemory_rate = "{memory / 1e9:.2f} GB/s"\n\n'
        f'[local]\nrate = "{memory / 1e9:.2f} GB/s"\nlatency_us = 1\nmessage_us = 0.5\nmulticast = true\n\n'
        f'[network]\nrate = "{links["gbit"]:.3f} Gbit/s"\nlatency_us = {half / 2:.1f}\nmessage_us = {half / 2:.1f}\n'
    )
    return path


def measured(shape: str, op: str, opt, folder: Path) -> list[dict]:
    """Rows of one collective: bytes, microseconds (the slowest rank's mean), algorithm and segment."""
    hosts, procs = shape.split("x")
    found = folder / f"{shape}-{op}.json"
    least, most = opt.sizes[0], opt.sizes[-1]
    bench = f"{opt.bench} {op} -b {least} -e {most} -f 4 -n {opt.iters} -w 2 -a 3 -c 0 -J {found.resolve()}"
    inner = f"exec taskset -c $((RANK % {os.cpu_count()})) {bench}"
    run([NETLAB, "run", "--hosts", hosts, "--procs", procs, "--rate", opt.rate, "--raw", "--", "sh", "-c", inner])
    rows = []
    for line in json.loads(found.read_text())["results"]:
        plan = re.search(r"(\S+), segments of (\d+) (KiB|MiB|B)", line["path"])
        if not plan:
            raise RuntimeError(f"no plan in {line['path']!r}")
        segment = int(plan[2]) * {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}[plan[3]]
        # Twice the same call where it has no form in place of its own.
        us = statistics.mean([line["out_of_place"]["time"], line["in_place"]["time"]])
        rows.append({"bytes": line["size"], "us": us, "algorithm": plan[1], "segment": segment})
    return rows


def simulated(shape: str, op: str, row: dict, file: Path, opt) -> float:
    hosts, procs = shape.split("x")
    found = file.with_suffix(".json")
    cmd = [opt.bench, "simulate", op, "--cluster", file, "--nodes", hosts, "--ppn", procs, "--bytes", row["bytes"]]
    run([*cmd, "--algorithm", row["algorithm"], "--segment", row["segment"], "-J", found])
    return json.loads(found.read_text())["rows"][0]["time_us"]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, default=Path("target/bench/predict"))
    p.add_argument("--rate", default="1gbit")
    p.add_argument("--shapes", default="2x1,2x2,4x1,4x2")
    p.add_argument("--ops", default="all_gather,reduce_scatter,all_reduce")
    p.add_argument("--sizes", default="1M,4M,16M", help="each four times the one before")
    p.add_argument("--iters", type=int, default=6)
    p.add_argument("--bench", default="smddp-bench")
    p.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    o = p.parse_args()
    if o.probe:
        (o.probe / "links.json").write_text(json.dumps(probe(o.probe)))
        return 0
    o.sizes = o.sizes.split(",")
    o.out.mkdir(parents=True, exist_ok=True)
    run(["cc", "-O2", "-pthread", "-o", o.out / "rawtcp", LAB / "rawtcp.c"])
    run(["cc", "-O2", "-pthread", "-o", o.out / "linkprobe", LAB / "peers" / "linkprobe.c"])
    again = [sys.executable, __file__, "--probe", o.out.resolve()]
    run([NETLAB, "up", "--hosts", "2", "--rate", o.rate, "--", *again])
    links = json.loads((o.out / "links.json").read_text())
    memory = copy_rate()
    file = cluster(o.out, links, memory)
    print(
        f"Links of {o.rate}: {links['gbit']:.3f} Gbit/s, "
        f"half a round trip of spinning sockets {links['half_us']:.1f} us; "
        f"memory copied at {memory / 1e9:.1f} GB/s.\n"
    )
    print("| hosts x ranks | collective | size | plan | predicted us | measured us | predicted ÷ measured |")
    print("|" + "---|" * 7)
    rows, off = [], []
    for shape in o.shapes.split(","):
        for op in o.ops.split(","):
            for row in measured(shape, op, o, o.out):
                row |= {"shape": shape, "op": op, "predicted_us": simulated(shape, op, row, file, o)}
                rows.append(row)
                ratio = row["predicted_us"] / row["us"]
                off.append(abs(ratio - 1))
                text = f"{ratio:.3f}" if off[-1] <= GOAL else f"**{ratio:.3f}**"
                print(
                    f"| {shape.replace('x', ' x ')} | {op} | {row['bytes'] >> 20} MiB | "
                    f"{row['algorithm']}, "
                    f"{row['segment'] >> 10} KiB | {row['predicted_us']:,.0f} | "
                    f"{row['us']:,.0f} | {text} |",
                    flush=True,
                )
    within = sum(x <= GOAL for x in off)
    print(
        f"\n{within} of {len(off)} within {GOAL:.0%}; off by {statistics.median(off):.1%} in the middle, "
        f"{max(off):.1%} at most."
    )
    (o.out / "rows.json").write_text(json.dumps({"links": links, "memory": memory, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
