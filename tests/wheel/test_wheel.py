"""The wheel file: its content, and its use in an environment without other packages.

Tests the one wheel in dist/ (`make wheel`), or the file that $WHEEL names. Nothing is downloaded.
"""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks.launching import free_port

# Libraries of every glibc system, the only permitted links of the binary.
SYSTEM_LIBRARIES = {
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
}


class Environment:
    """A virtual environment that holds the wheel and nothing else."""

    def __init__(self, home: Path, wheel: Path):
        if not wheel.stem.endswith(f"_{platform.machine()}"):
            pytest.skip(f"{wheel.name} does not run on this machine ({platform.machine()})")
        self.home = home
        self.bin = home / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.bin / "python"]
        subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", wheel], check=True)

    @property
    def site_packages(self) -> Path:
        return Path(sysconfig.get_path("purelib", "venv", {"base": self.home, "platbase": self.home}))

    def popen(self, program: str, *arguments: str, **more: str) -> subprocess.Popen[str]:
        """Starts a program of this environment, without access to the sources, in a new session."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SMDDP_"))}
        return subprocess.Popen(
            [self.bin / program, *arguments],
            cwd=self.home,
            env={**env, **more},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, program: str, *arguments: str) -> str:
        """Returns the output of a program, which must succeed."""
        process = self.popen(program, *arguments)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err or out
        return out

    def python(self, code: str) -> str:
        return self.run("python", "-c", code)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("bare") / "venv", wheel)


@pytest.fixture(scope="module")
def beside_torch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel, with the packages of the Python that runs the tests behind it (its own smddp comes second)."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed")
    environment = Environment(tmp_path_factory.mktemp("beside_torch") / "venv", wheel)
    packages = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (environment.site_packages / "behind.pth").write_text("\n".join(packages) + "\n")
    return environment


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The native module, unpacked."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract("smddp/_core.abi3.so", tmp_path_factory.mktemp("core")))


def readelf(*arguments: str | Path) -> str:
    if shutil.which("readelf") is None:
        pytest.skip("readelf (binutils) is not installed")
    return subprocess.run(["readelf", "--wide", *arguments], check=True, capture_output=True, text=True).stdout


def test_one_file_serves_all_pythons_from_310(wheel: Path):
    assert re.fullmatch(r"smddp-[\w.]+-cp310-abi3-manylinux_2_\d+_(x86_64|aarch64)\.whl", wheel.name)


def test_it_carries_both_packages_types_and_licence_and_no_leftovers(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "smddp/__init__.py",
        "smddp/_core.abi3.so",
        "smddp/_core.pyi",
        "smddp/py.typed",
        "smdistributed/dataparallel/torch/torch_smddp/__init__.py",
    } <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"smddp", "smdistributed"}
    # Other installed parts of that namespace remain usable.
    assert "smdistributed/__init__.py" not in names
    assert not [name for name in names if "__pycache__" in name]
    assert [name for name in names if name.endswith(".so")] == ["smddp/_core.abi3.so"]


def test_it_requires_nothing(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        header = archive.read(name).decode().split("\n\n")[0]
    required = [line for line in header.splitlines() if line.startswith("Requires-Dist:")]
    assert [line for line in required if "extra ==" not in line] == []


def test_the_binary_links_to_the_c_library_alone(core: Path):
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", readelf("--dynamic", core)))
    assert needed <= SYSTEM_LIBRARIES


def test_the_binary_has_no_recorder_of_the_failure_monitor(core: Path):
    assert b"SMDDP_TEST_FAILURE_RECORDS" not in core.read_bytes()


def test_backtraces_can_name_functions_and_the_file_stays_small(core: Path, wheel: Path):
    assert ".symtab" in readelf("--sections", core)
    # Line tables of all there is in the binary would double it.
    assert wheel.stat().st_size < 4 * 2**20


def test_the_benchmark_runs_without_torch(bare: Environment):
    table = bare.run("smddp-bench", "all_gather", "--nproc", "2", "-b", "8", "-e", "1M", "-f", "8")
    sizes = re.findall(r"^\s*(\d+)\s", table, re.MULTILINE)
    assert [int(size) for size in sizes] == [8, 64, 512, 4096, 32768, 262144, 2**20], table


def test_ctrl_c_ends_the_benchmark_as_a_signal_does(bare: Environment):
    process = bare.popen("smddp-bench", "all_gather", "--nproc", "2", "-b", "8", "-e", "1M", "-n", "1000000000")
    try:
        assert process.stdout.readline(), process.stderr.read()
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, out + err
    assert "Traceback" not in err


def test_two_ranks_sum_arrays_with_only_the_wheel(bare: Environment):
    script = (
        "import array, os, smddp\n"
        "with smddp.init(int(os.environ['ME']), 2, os.environ['AT'], timeout=60) as comm:\n"
        "    print(list(comm.all_reduce(array.array('f', [comm.rank, 1]))), comm.all_gather_object(comm.rank))\n"
    )
    at = f"127.0.0.1:{free_port()}"
    ranks = [bare.popen("python", "-c", script, ME=str(rank), AT=at) for rank in range(2)]
    assert [rank.communicate(timeout=60) for rank in ranks] == [("[1.0, 2.0] [0, 1]\n", "")] * 2


def test_info_runs_without_torch(bare: Environment):
    shown = bare.run("smddp", "info")
    assert "torch not installed" in shown
    assert "all_gather" in shown


def test_importing_the_package_loads_neither_torch_nor_the_core(bare: Environment):
    assert bare.python("import sys, smddp; print('smddp._core' in sys.modules, smddp.__version__ > '')").split() == [
        "False",
        "True",
    ]


def test_the_historic_import_names_torch_where_it_is_missing(bare: Environment):
    process = bare.popen("python", "-c", "import smdistributed.dataparallel.torch.torch_smddp")
    _, err = process.communicate(timeout=60)
    last = err.strip().splitlines()[-1]
    assert process.returncode == 1
    assert re.match(r"(ImportError|ModuleNotFoundError): .*\btorch\b", last), err


def test_torch_finds_the_backend_by_itself_and_stays_light(beside_torch: Environment):
    found = beside_torch.python(
        "import sys, torch, torch.distributed as dist\n"
        "print(dist.is_backend_available('smddp'), 'smddp._core' in sys.modules)\n"
        "import smddp._core\n"
        "print(smddp.__file__, smddp._core.__file__, sep='\\n')\n"
    ).splitlines()
    assert found[0] == "True False"
    for file in found[1:]:
        assert Path(file).is_relative_to(beside_torch.home), "another smddp was tested than the wheel's"
