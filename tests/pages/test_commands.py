"""The commands of README.md and docs/get-started work as written.

A command that these pages have and no row here, or the other way round, is an error.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import reading

ROOT = reading.ROOT
LAB = ROOT / "bench" / "lab"
START = "docs/get-started"
FIRST = f"{START}/first-run.md"
PAGES = ("README.md", FIRST, f"{START}/install.md", f"{START}/multi-node.md", f"{START}/examples.md")
# Python block of a page that becomes `script.py`: the first one is PyTorch's, the last one NumPy's.
TORCH, ARRAYS = 0, -1
ROOT_MAY = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Row:
    """Execution of a command, and its expected output."""

    says: str
    script: int = TORCH
    #: seconds
    limit: int = 100
    needs: str = ""
    #: what the command finds in its folder
    before: str = ""
    #: on which of the lab's two hosts, whose names stand in place of HOST, a and b
    hosts: str = ""
    status: tuple[int, ...] = (0,)
    #: in `make test-pages` alone
    slow: bool = False
    #: options that make it short, behind it in `make test`; `make test-pages` runs it as it is written
    shorter: str = ""


ROWS = {
    "smddp --version": Row("torch"),
    "SMDDP_DEBUG=INFO torchrun --standalone --nproc-per-node 2 script.py": Row("over shm"),
    "SMDDP_NODE=%r SMDDP_DEBUG=INFO torchrun --standalone --nproc-per-node 2 script.py": Row("on 2 node(s), over tcp"),
    "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 script.py": Row(
        "", hosts="each"
    ),
    "mpirun -np 8 --host a:4,b:4 smddprun python script.py": Row("", needs="mpirun", hosts="first"),
    # tests/estimator/test_jobs.py has another host's ranks, too.
    "smddp launch script.py --hosts a:4,b:4": Row("", hosts="first", slow=True),
    "mpirun -np 4 python script.py": Row("", ARRAYS, needs="mpirun"),
    "mpirun -np 4 python examples/numpy_allreduce.py": Row("4 ranks", needs="mpirun"),
    # A machine that tests run on may lack what a training machine needs: status 1 with findings is permitted.
    "smddp doctor": Row("libfabric", status=(0, 1)),
    "smddp doctor --quick": Row("libfabric", status=(0, 1)),
    "smddp info": Row("libfabric"),
    # Other jobs may be there, or none.
    "smddp status": Row("group", status=(0, 1, 3)),
    "smddp-bench all_reduce --nproc 4 -b 8 -e 64M -f 8": Row("# Out of bounds values : 0 OK", shorter="-n 2 -w 1"),
    "smddp-bench all_reduce --torch smddp,gloo --nproc 2": Row("gloo", shorter="-n 2 -w 1"),
    "smddp-bench startup --nproc 64": Row("64"),
    "smddp-bench explain all_gather --bytes 64M --nodes 4 --ppn 8 --draw plan.svg": Row("all_gather"),
    "smddp-bench replay dumps/*.json": Row(
        "",
        before="mkdir dumps && SMDDP_DUMP_DIR=dumps smddprun --nproc 2 python -c '"
        "import numpy, smddp\nwith smddp.init() as comm:\n"
        '  comm.all_reduce(numpy.ones(3))\n  smddp.dump(f"dumps/{comm.rank}.json")\'',
    ),
}
#: The same, longer than `make test` should take: `make test-pages` has them.
SLOW_ROWS = {
    "make demo": Row("text never trained on", limit=600),
    "make demo-hosts": Row("text never trained on", limit=600),
    "make demo-smp": Row("", limit=600),
    "make demo-smp-v1": Row("", limit=600),
    "make demo-tf": Row("", limit=900),
    "make demo-launch": Row("4 ranks", limit=600),
    "make wheel && pip install dist/smddp-*.whl": Row("Successfully installed smddp", limit=1200),
    "make wheel": Row("smddp-", limit=1200),
    "make wheel-portable": Row("smddp-", limit=1800),
    "pip install dist/portable/smddp-*_$(uname -m).whl": Row(
        "Successfully installed smddp", before="make wheel-portable && pip uninstall --yes smddp", limit=1800
    ),
    "uv pip install dist/portable/smddp-*_$(uname -m).whl": Row(
        "+ smddp", needs="uv", before="make wheel-portable && pip uninstall --yes smddp", limit=1800
    ),
    "torchrun --standalone --nproc-per-node 4 examples/fsdp2.py --backend gloo": Row(
        "text never trained on", before="make demo", limit=900
    ),
}
_ENGINES = "tests/launch/third_party/test_real_engines.py"
#: Held by other tests, that have what these need.
ELSEWHERE = {
    "make test": ".ci/run",
    "make wheel-aarch64": ".github/workflows/package.yml",
    "make wheel-freethreaded FREETHREADED=python3.14t": "Makefile",
    "pip uninstall --yes smdistributed-dataparallel smdistributed-modelparallel": "docker/extend.Dockerfile",
    "smddp completion bash > ~/.local/share/bash-completion/completions/smddp": "tests/cli/test_pages.py",
    "smddp man doctor | man -l -": "tests/cli/test_pages.py",
    "smddp man --to ~/.local/share/man/man1": "tests/cli/test_pages.py",
    "ln -s smddp ~/.local/share/bash-completion/completions/smddprun": "tests/cli/test_pages.py",
    "torchrun --standalone --nproc-per-node 4 examples/ddp.py --steps 20": "tests/hosts/test_training.py",
    "smddp trace": "tests/pages/test_examples.py",
    "python examples/elastic_ddp.py": "tests/faults/test_living_on.py",
    "smddprun --nproc 4 python examples/tensorflow_mnist.py": "Makefile",
    "srun -n 8 smddprun python script.py": "tests/launch/third_party/test_slurm.py",
    "smddp launch script.py --engine slurm --nodes 2 -n 4": _ENGINES,
    "smddp launch script.py --engine kubernetes --nodes 2 -n 4 --image IMAGE": _ENGINES,
    # No daemon where tests run: the files that images are made of are read by that test.
    "docker run --shm-size 8g --network host": "tests/source/test_dockerfiles.py",
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that has what the commands mean by relative names."""
    for name in ("Makefile", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ssh").symlink_to(LAB / "netlab-rsh")
    return tmp_path


def environment(place: Path) -> dict[str, str]:
    """As in an activated environment; `ssh` leads to the lab's hosts."""
    path = os.pathsep.join([str(place / "programs"), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, **ROOT_MAY, "PATH": path, "OMP_NUM_THREADS": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def written(command: str, place: Path, row: Row, page: str) -> subprocess.CompletedProcess:
    """Runs a command of a page in `place`, with that page's script beside it."""
    blocks = reading.scripts(page) or reading.scripts(FIRST)
    (place / "script.py").write_text(blocks[row.script])
    env, words = environment(place), ["bash", "-c", command]
    if row.hosts:
        command = re.sub(r"\bHOST\b|\ba(?=:\d)", "h0", re.sub(r"\bb(?=:\d)", "h1", command))
        words = ["bash", "-c", command]
        env |= {"OMPI_MCA_plm_rsh_agent": str(LAB / "netlab-rsh"), "OMPI_MCA_plm_rsh_no_tree_spawn": "1"}
        env |= {"OMPI_MCA_btl_tcp_if_include": "eth0", "OMPI_MCA_oob_tcp_if_include": "eth0"}
        if row.hosts == "each":
            words = [LAB / "netlab", "run", "--hosts", "2", "--procs", "1", "--raw", "--", *words]
        else:
            inside = [LAB / "netlab", "exec", "h0", "--", "sh", "-c", f"cd {place} && {shlex.join(words)}"]
            words = [LAB / "netlab", "up", "--hosts", "2", "--", *inside]
    return subprocess.run(words, cwd=place, env=env, capture_output=True, text=True, timeout=row.limit)


def holds(page: str, command: str, row: Row, place: Path) -> None:
    if row.needs and shutil.which(row.needs) is None:
        pytest.skip(f"no {row.needs} on this machine")
    if row.hosts and subprocess.run([LAB / "netlab", "check"], capture_output=True).returncode != 0:
        pytest.skip("no network namespaces here (bench/lab/netlab check)")
    if row.before:
        subprocess.run(["bash", "-c", row.before], cwd=place, check=True, env=environment(place), timeout=row.limit)
    done = written(command, place, row, page)
    output = done.stdout + done.stderr
    assert done.returncode in row.status, output
    assert row.says.lower() in output.lower(), output
    assert "Traceback" not in output, output


def rows_of(rows: dict[str, Row]) -> list:
    """Each command once, of the first page that has it; one with a shorter form twice."""
    pages = {command: page for page in reversed(PAGES) for command in reading.commands(page)}
    runs = []
    for command, row in rows.items():
        if command not in pages:
            continue
        if row.shorter:
            runs.append(pytest.param(pages[command], command, row.shorter, id=f"{command} {row.shorter}"))
        marks = [pytest.mark.slow] * (row.slow or bool(row.shorter))
        runs.append(pytest.param(pages[command], command, "", id=command, marks=marks))
    return runs


def test_each_command_of_the_pages_is_run_by_a_test():
    documented = {command for page in PAGES for command in reading.commands(page)}
    printed = {command for page, _script, command, _says in PRINTED.values() if command in reading.commands(page)}
    assert documented == {*ROWS, *SLOW_ROWS, *ELSEWHERE, *printed}
    for command, file in ELSEWHERE.items():
        assert (ROOT / file).exists(), f"{command} is held by {file}, which is not there"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("page, command, more", rows_of(ROWS))
def test_command_works_as_documented(page: str, command: str, more: str, place: Path):
    holds(page, f"{command} {more}".strip(), ROWS[command], place)


FOUR_RANKS, FOUR_PROCESSES = "torchrun --standalone --nproc-per-node 4 script.py", "smddprun --nproc 4 python script.py"
PRINTED = {
    "README torch": ("README.md", TORCH, FOUR_RANKS, "rank 3 of 4: [6.0, 6.0, 6.0, 6.0]"),
    "README arrays": ("README.md", ARRAYS, FOUR_PROCESSES, "rank 0 of 4: [4. 4. 4.]"),
    "script.py": (FIRST, TORCH, FOUR_RANKS, "rank 3 of 4: [4.0, 4.0, 4.0, 4.0]"),
    "notebook": (FIRST, 1, "python script.py", "2.0"),
    "arrays": (FIRST, ARRAYS, FOUR_PROCESSES, "[4. 4. 4.]"),
}


@pytest.mark.parametrize("which", PRINTED)
def test_script_of_a_page_prints_the_sum(which: str, place: Path):
    page, script, command, says = PRINTED[which]
    if page == "README.md":
        assert f"\n{says}\n" in (ROOT / page).read_text(), "the page shows another output"
    # The notebook's port is written out: a host of the lab has it free.
    lab = "" if which != "notebook" else "first"
    holds(page, command, Row(says, script, hosts=lab), place)


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """Clone of the repository with a new environment."""
    place = tmp_path_factory.mktemp("newcomer") / "smddp"
    subprocess.run(["git", "clone", "--quiet", ROOT, place], check=True)
    subprocess.run([sys.executable, "-m", "venv", place / "own"], check=True)
    return place


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("page, command, more", rows_of(SLOW_ROWS))
def test_long_command_works_as_documented(page: str, command: str, more: str, clone: Path):
    assert not more
    row = SLOW_ROWS[command]
    if row.needs and shutil.which(row.needs) is None:
        pytest.skip(f"no {row.needs} on this machine")
    bin = clone / (".venv" if command.startswith("torchrun") else "own") / "bin"
    env = {**os.environ, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(bin.parent)}
    words = ["bash", "-c", f"{row.before or ':'} && {command}"]
    done = subprocess.run(words, cwd=clone, env=env, capture_output=True, text=True, timeout=row.limit)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert row.says in output, output
