"""smddp over tcp against plain sockets: what a message costs beyond what the kernel asks for.

  bench/lab/quiet --rt bench/raw.py                  two hosts of bench/lab/netlab, then loopback; about a minute
  bench/raw.py --places loopback --sizes 8,64k       some of it

Exchange: both sides send at once and wait for what the other sent. Raw is the quicker of blocking sockets and of
non-blocking ones that are tried again at once (bench/lab/rawtcp.c); ours are `smddp-bench sendrecv` and all_gather on
two ranks. Stream: one way; raw over 1, 2 and 4 connections, ours is broadcast. Means, over many turns.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
NETLAB = HERE / "lab" / "netlab"
PORT = 28777


def number(text: str) -> int:
    unit = {"k": 1 << 10, "m": 1 << 20}.get(text[-1].lower(), 1)
    return int(text.rstrip("kKmM")) * unit


def turns(size: int) -> int:
    return max(50, min(5000, (256 << 20) // max(size, 1)))


class Loopback:
    name = "loopback"
    address = "127.0.0.1"

    def command(self, rank: int, words: list[str]) -> list[str]:
        return words

    def environment(self) -> dict[str, str]:
        return {"SMDDP_NODE": "%r", "SMDDP_SOCKET_IFNAME": "=lo"}


class Hosts:
    """Inside `netlab up --hosts 2`."""

    name = "hosts"
    address = "10.77.0.2"

    def command(self, rank: int, words: list[str]) -> list[str]:
        return [str(NETLAB), "exec", f"h{rank}", "--", *words]

    def environment(self) -> dict[str, str]:
        return {"SMDDP_SOCKET_IFNAME": "=eth0"}


class Bench:
    def __init__(self, place, tool: Path, bench: str, folder: Path):
        self.place, self.tool, self.bench, self.folder = place, tool, bench, folder

    def raw(self, *words: object) -> float:
        what, *rest = (str(w) for w in words)
        cmd = self.place.command(0, [str(self.tool), what, self.place.address, str(PORT), *rest])
        out = subprocess.run(cmd, env={**os.environ, "PIN": "0"}, capture_output=True, text=True, check=True).stdout
        return float(out.split()[1])

    def ours(self, op: str, size: int, turns: int, side: str = "out_of_place") -> float:
        """Mean microseconds of a call with buffers of `size` bytes in all."""
        found = self.folder / "row.json"
        both = []
        for rank in range(2):
            env = {**os.environ, **self.place.environment()}
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
            env |= {"MASTER_ADDR": "10.77.0.1" if self.place.name == "hosts" else "127.0.0.1", "MASTER_PORT": "28779"}
            words = [self.bench, op, "-b", size, "-e", size, "-n", turns, "-w", turns // 10 + 1, "-a", 3, "-J", found]
            words = ["taskset", "-c", rank % (os.cpu_count() or 1), *words]
            cmd = self.place.command(rank, [str(w) for w in words])
            both.append(subprocess.Popen(cmd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        for p in both:
            out = p.communicate(timeout=120)[0]
            if p.returncode:
                raise RuntimeError(out)
        (row,) = json.loads(found.read_text())["results"]
        if row[side]["nwrong"]:
            raise RuntimeError(f"{op} {size}: wrong elements")
        return row[side]["time"]


def measure(place, opt, folder: Path) -> list[dict]:
    tool = folder / "rawtcp"
    subprocess.run(["cc", "-O2", "-pthread", "-o", tool, HERE / "lab" / "rawtcp.c"], check=True)
    bench = Bench(place, tool, opt.bench, folder)
    server = subprocess.Popen(place.command(1, [str(tool), "serve", str(PORT)]), env={**os.environ, "PIN": "1"})
    rows = []
    try:
        for size in opt.sizes:
            n = turns(size)
            row = {"place": place.name, "what": "exchange", "bytes": size}
            row["block_us"] = bench.raw("exchange", size, n, "block")
            row["spin_us"] = bench.raw("exchange", size, n, "spin")
            row["sendrecv_us"] = bench.ours("sendrecv", size, n)
            row["all_gather_us"] = bench.ours("all_gather", 2 * size, n)
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
        row = {"place": place.name, "what": "stream", "bytes": 64 << 20}
        for streams in (1, 2, 4):
            row[f"raw{streams}_gbit"] = bench.raw("stream", 1 << 20, streams, 1.5)
        row["broadcast_gbit"] = (64 << 20) * 8e-3 / bench.ours("broadcast", 64 << 20, 20, "in_place")
        rows.append(row)
        print(row, file=sys.stderr, flush=True)
    finally:
        server.terminate()
        server.wait()
    return rows


def table(rows: list[dict]) -> None:
    head = ["where", "bytes each way", "blocking us", "spinning us", "sendrecv us", "all_gather us"]
    print("| " + " | ".join([*head, "sendrecv ÷ raw", "all_gather ÷ raw"]) + " |")
    print("|" + "---|" * 8)
    for r in (r for r in rows if r["what"] == "exchange"):
        raw = min(r["block_us"], r["spin_us"])
        times = [f"{r[k]:.1f}" for k in ("block_us", "spin_us", "sendrecv_us", "all_gather_us")]
        ratios = [f"{r[k] / raw:.2f}" for k in ("sendrecv_us", "all_gather_us")]
        print(f"| {r['place']} | {r['bytes']:,} | " + " | ".join(times + ratios) + " |")
    print("\n| where | 1 stream Gbit/s | 2 streams | 4 streams | broadcast of 64 MiB | 1 stream ÷ broadcast |")
    print("|" + "---|" * 6)
    for r in (r for r in rows if r["what"] == "stream"):
        rates = [f"{r[k]:.2f}" for k in ("raw1_gbit", "raw2_gbit", "raw4_gbit", "broadcast_gbit")]
        print(f"| {r['place']} | " + " | ".join(rates) + f" | {r['raw1_gbit'] / r['broadcast_gbit']:.2f} |")


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--places", default="hosts,loopback")
    p.add_argument("--sizes", default="8,64,1k,8k,64k,256k,1m,4m")
    p.add_argument("--rate", help="of the hosts' links, as 10gbit (default: not shaped)")
    p.add_argument("--bench", default=str(Path(sys.executable).with_name("smddp-bench")))
    p.add_argument("--json", type=Path)
    p.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    o = p.parse_args()
    o.sizes = [number(s) for s in o.sizes.split(",")] if isinstance(o.sizes, str) else o.sizes
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        for name in o.places.split(","):
            if name == "hosts" and not o.inside:
                found = Path(folder) / "hosts.json"
                again = [sys.executable, __file__, "--places", "hosts", "--sizes", ",".join(map(str, o.sizes))]
                again += ["--bench", o.bench, "--inside", str(found)]
                shaped = ["--rate", o.rate] if o.rate else []
                subprocess.run([str(NETLAB), "up", "--hosts", "2", *shaped, "--", *again], check=True)
                rows += json.loads(found.read_text())
            else:
                rows += measure(Hosts() if name == "hosts" else Loopback(), o, Path(folder))
        if o.inside:
            o.inside.write_text(json.dumps(rows))
            return 0
        if o.json:
            o.json.write_text(json.dumps(rows, indent=1))
        table(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
