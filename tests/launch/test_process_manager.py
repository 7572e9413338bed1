"""Lookup of rank 0's host from mpirun's process manager, with fake PMIx and Hydra (tests/pages has a real one)."""

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ranks.launching import clean

SHOW = "import os; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
SMDDPRUN = [str(Path(sys.executable).parent / "smddprun"), sys.executable, "-c", SHOW]
PMIX = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { char nspace[256]; unsigned rank; } proc_t;
typedef struct { unsigned short type; union { char *string; char room[24]; } data; } value_t;
int PMIx_Init(proc_t *proc, void *info, size_t n) {
    strcpy(proc->nspace, "job");
    proc->rank = atoi(getenv("PMIX_RANK"));
    return getenv("FAILS") ? -25 : 0;
}
int PMIx_Get(const proc_t *proc, const char *key, void *info, size_t n, value_t **value) {
    static value_t found;
    if (strcmp(proc->nspace, "job") || proc->rank != 0 || strcmp(key, "pmix.hname")) return -46;
    found.type = 3;
    found.data.string = "first-host";
    *value = &found;
    return 0;
}
int PMIx_Finalize(void *info, size_t n) { puts("left"); return fflush(stdout); }
"""


def of_open_mpi(rank: int) -> dict[str, str]:
    """Rank `rank` of four on two hosts."""
    own = {"RANK": rank, "SIZE": 4, "LOCAL_RANK": rank % 2, "LOCAL_SIZE": 2}
    mpi = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in own.items()}
    return {**clean(), **mpi, "PMIX_RANK": str(rank), "PMIX_NAMESPACE": "job@1"}


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> Path:
    """Open MPI prefix with a fake PMIx library that supplies rank 0's host only."""
    place = tmp_path_factory.mktemp("openmpi")
    (place / "lib").mkdir()
    (place / "pmix.c").write_text(PMIX)
    compiler = shutil.which("cc") or pytest.skip("no C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", place / "lib" / "libpmix.so.2", place / "pmix.c"], check=True)
    return place


def test_open_mpi_ranks_receive_rank_0s_host_and_finalize(prefix):
    env = {**of_open_mpi(3), "OPAL_PREFIX": str(prefix)}
    done = subprocess.run(SMDDPRUN, env=env, capture_output=True, text=True, timeout=60)
    left, address = done.stdout.splitlines()
    assert (left, address.split()[0]) == ("left", "first-host"), done.stderr
    # A rank with MASTER_ADDR skips the query.
    done = subprocess.run(SMDDPRUN, env={**env, "MASTER_ADDR": "known"}, capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[0] == "known", done.stderr


def test_a_failed_query_is_reported_with_instructions(prefix):
    env = {**of_open_mpi(3), "OPAL_PREFIX": str(prefix), "FAILS": "1"}
    done = subprocess.run(SMDDPRUN, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "MASTER_ADDR is not set" in done.stderr
    assert "PMIx_Init" in done.stderr and "returns -25" in done.stderr and "-x MASTER_ADDR=HOST" in done.stderr


class Hydra(threading.Thread):
    """The PMI 1 server side of `mpiexec`."""

    def __init__(self, size: int):
        super().__init__(daemon=True)
        pairs = [socket.socketpair() for _ in range(size)]
        self.own, self.ranks = [own for own, _ in pairs], [rank for _, rank in pairs]
        self.values: dict[str, str] = {}
        self.left: list[int] = []
        self.all_here = threading.Barrier(size)

    def run(self):
        serving = [threading.Thread(target=self.serve, args=args, daemon=True) for args in enumerate(self.own)]
        for thread in serving:
            thread.start()
        for thread in serving:
            thread.join()

    def serve(self, rank: int, own: socket.socket):
        lines = own.makefile("rw")
        for line in lines:
            words = dict(word.split("=", 1) for word in line.split())
            answer = {
                "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
                "get_my_kvsname": "my_kvsname kvsname=kvs_7_h0",
                "put": "put_result rc=0 msg=success",
                "barrier_in": "barrier_out",
                "finalize": "finalize_ack",
            }
            if words["cmd"] == "put":
                self.values[words["key"]] = words["value"]
            elif words["cmd"] == "barrier_in":
                self.all_here.wait(60)
            elif words["cmd"] == "finalize":
                self.left.append(rank)
            if words["cmd"] == "get":
                said = f"get_result rc=0 msg=success value={self.values[words['key']]}"
            else:
                said = answer[words["cmd"]]
            lines.write(f"cmd={said}\n")
            lines.flush()


def test_hydra_ranks_agree_on_host_and_port_and_finalize():
    hydra = Hydra(4)
    hydra.start()
    started = []
    for rank, end in enumerate(hydra.ranks):
        own = {"PMI_RANK": str(rank), "PMI_SIZE": "4", "PMI_FD": str(end.fileno())}
        own |= {"MPI_LOCALRANKID": str(rank % 2), "MPI_LOCALNRANKS": "2"}
        env = {**clean(), **own}
        started.append(subprocess.Popen(SMDDPRUN, env=env, stdout=-1, text=True, pass_fds=[end.fileno()]))
    addresses = {process.communicate(timeout=60)[0].strip() for process in started}
    assert len(addresses) == 1
    host, port = addresses.pop().split()
    assert host == os.uname().nodename and 20_000 <= int(port) < 32_000
    assert sorted(hydra.left) == [0, 1, 2, 3]
