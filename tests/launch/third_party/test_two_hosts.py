"""mpirun across two hosts with the toolkit's options, on network namespaces; netlab's command replaces ssh."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAB = Path(__file__).parents[3] / "bench" / "lab"
SUM = """
import os, torch, torch.distributed as dist
dist.init_process_group("smddp")
total = torch.ones(3)
dist.all_reduce(total)
assert total.tolist() == [4, 4, 4]
line = "rank {RANK} local {LOCAL_RANK} node {NODE_RANK}\\n".format_map(os.environ)
os.write(1, line.encode())  # one write, so that ranks' lines do not interleave
dist.destroy_process_group()
"""


@pytest.mark.parametrize("strategy", ["data parallel", "model parallel"])
def test_ranks_on_two_hosts_connect_with_master_addr_on_one_host_only(tmp_path, strategy):
    """The toolkit sets MASTER_ADDR for mpirun, which does not forward it; data parallel strategies pass a server."""
    smddprun, mpirun = shutil.which("smddprun"), shutil.which("mpirun")
    if mpirun is None or smddprun is None:
        pytest.skip("no mpirun on this machine (Debian: openmpi-bin)")
    if subprocess.run([LAB / "netlab", "check"], capture_output=True).returncode != 0:
        pytest.skip("no network namespaces here (bench/lab/netlab check)")
    script = tmp_path / "script.py"
    script.write_text(SUM)
    variables = {"SM_HOSTS": '["h0", "h1"]', "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    if strategy == "data parallel":
        variables |= {"SMDATAPARALLEL_SERVER_ADDR": "h0", "SMDATAPARALLEL_SERVER_PORT": "7592"}
    options = [word for name, value in variables.items() for word in ("-x", f"{name}={value}")]
    for name in ("btl_tcp_if_include", "oob_tcp_if_include"):
        options += ["--mca", name, "eth0"]
    options += ["--mca", "plm_rsh_agent", str(LAB / "netlab-rsh"), "--mca", "plm_rsh_no_tree_spawn", "1"]
    command = [mpirun, "--allow-run-as-root", "--oversubscribe", "--host", "h0:2,h1:2", "-np", "4", *options]
    command += [smddprun, sys.executable, str(script)]
    shell = f"cd {tmp_path} && MASTER_ADDR=h0 MASTER_PORT=7777 exec {shlex.join(command)}"
    lab = [LAB / "netlab", "up", "--hosts", "2", "--", LAB / "netlab", "exec", "h0", "--", "sh", "-c", shell]
    done = subprocess.run(lab, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    said = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert [line.split()[1::2] for line in said] == [["0", "0", "0"], ["1", "1", "0"], ["2", "0", "1"], ["3", "1", "1"]]
