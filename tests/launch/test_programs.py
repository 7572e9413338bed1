"""`smddprun` and its relatives, as they are installed: under a launcher they become the rank's command, else they start
local ranks.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks.launching import LAUNCHERS, clean, openmpi, outputs, start

BIN = Path(sys.executable).parent
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
SHOW = f"import json, os; print(json.dumps([os.environ.get(name) for name in {NAMES}]))"
SUM = (
    "import torch, torch.distributed as dist\n"
    "dist.init_process_group('smddp')\n"
    "total = torch.ones(3)\n"
    "dist.all_reduce(total)\n"
    "assert total.tolist() == [dist.get_world_size()] * 3\n"
    "dist.destroy_process_group()\n"
)
#: The same without torch, which takes seconds to start.
ARRAYS = (
    "import numpy, smddp\n"
    "with smddp.init() as comm:\n"
    "    assert comm.all_reduce(numpy.ones(3)).tolist() == [comm.size] * 3\n"
)


def run(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = (str(BIN / command[0]), *command[1:])
    return subprocess.run(command, env={**clean(), **more}, capture_output=True, text=True, timeout=100)


def test_loopback_interface_that_is_down_is_reported_immediately():
    apart = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("no network namespace can be made here")
    command = [*apart, BIN / "smddprun", "--nproc", "2", sys.executable, "-c", ARRAYS]
    done = subprocess.run(command, env=clean(), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "the loopback interface is down" in done.stderr, done.stderr


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_torchs_variables_are_those_of_the_launcher(launcher):
    ports = set()
    for rank in range(2):
        done = run("smddprun", sys.executable, "-c", SHOW, **launcher(rank, 2, 12345))
        assert done.returncode == 0, done.stderr
        *numbers, host, port = json.loads(done.stdout)
        node = "0"
        assert numbers == [str(rank), "2", str(rank), "2", *([node] if launcher.__name__ != "torchrun" else [None])]
        assert host in ("127.0.0.1", "localhost")
        ports.add(port)
    assert len(ports) == 1 and int(ports.pop()) > 0


def test_sagemaker_variables_determine_rank_0_and_this_host():
    place = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "SM_HOSTS": '["algo-1", "algo-2"]',
        "SM_CURRENT_HOST": "algo-2",
        "SMDATAPARALLEL_SERVER_ADDR": "algo-1",
        "SMDATAPARALLEL_SERVER_PORT": "7592",
    }
    done = run("smddprun", sys.executable, "-c", SHOW, **place)
    assert json.loads(done.stdout) == ["3", "4", "1", "2", "1", "algo-1", "7592"], done.stderr
    # The toolkit sets these, and mpirun passes them only to the ranks of its host.
    done = run("smddprun", sys.executable, "-c", SHOW, **place, MASTER_ADDR="algo-1", MASTER_PORT="7777")
    assert json.loads(done.stdout)[-2:] == ["algo-1", "7592"]


def test_the_hosts_resource_configuration_overrides_mpirun(tmp_path):
    """The toolkit's `mpi` strategy gives ranks of all hosts the SM_CURRENT_HOST of the first."""
    config = tmp_path / "input" / "config" / "resourceconfig.json"
    config.parent.mkdir(parents=True)
    config.write_text('{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"]}')
    place = {**openmpi(3, 4, 1), "SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"}
    show = "import os; print(os.environ['NODE_RANK'], os.environ['SM_CURRENT_HOST'])"
    done = run("smddprun", sys.executable, "-c", show, **place, SAGEMAKER_BASE_DIR=str(tmp_path))
    assert done.stdout.split() == ["1", "algo-2"], done.stderr


def test_a_single_rank_uses_a_local_rendezvous():
    done = run("smddprun", sys.executable, "-c", SHOW, **openmpi(0, 1, 1))
    *numbers, host, port = json.loads(done.stdout)
    assert numbers == ["0", "1", "0", "1", "0"] and host == "127.0.0.1" and int(port) > 0, done.stderr
    done = run("smddprun", sys.executable, "-c", SUM, **openmpi(0, 1, 1))
    assert done.returncode == 0, done.stderr


def test_an_existing_store_keeps_its_address():
    place = {**openmpi(1, 2, 1), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "4321"}
    done = run("smddprun", sys.executable, "-c", SHOW, **place, TORCHELASTIC_USE_AGENT_STORE="True")
    assert json.loads(done.stdout) == ["1", "2", "1", "2", "0", "127.0.0.1", "4321"], done.stderr


def test_under_a_launcher_smddprun_execs_the_command():
    place = openmpi(0, 2, 1)
    assert run("smddprun", "sh", "-c", "exit 7", **place).returncode == 7
    assert run("smddprun", "sh", "-c", "kill -USR1 $$", **place).returncode == -signal.SIGUSR1
    assert run("smddpmprun", "-i", "ml.p4d.24xlarge", "--allow-bypass", "sh", "-c", "exit 5", **place).returncode == 5
    assert run("smddprun", "-x", "A=b c", "sh", "-c", 'test "$A" = "b c"', **place).returncode == 0
    done = run("smddprun", "no-such-program", **place)
    assert done.returncode == 127 and "no-such-program" in done.stderr


@pytest.mark.parametrize("program", ["smddprun", "smddpsinglenode", "smddp_singlenode_dev"])
def test_local_ranks_make_a_group(program):
    place = {} if program == "smddprun" else openmpi(0, 1, 1)
    group = SUM if program == "smddprun" else ARRAYS + "    assert comm.size == 2\n"
    done = run(program, "--nproc", "2", sys.executable, "-c", group, **place)
    assert done.returncode == 0, done.stderr


def test_the_first_failure_of_a_local_rank_is_named_and_ends_all(tmp_path):
    script = (
        "import os, sys, time, pathlib\n"
        f"pathlib.Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(os.getpid()))\n"
        "if os.environ['RANK'] == '1': sys.exit(9)\n"
        "time.sleep(60)\n"
    )
    begun = time.monotonic()
    done = run("smddprun", "--nproc", "3", sys.executable, "-c", script)
    assert done.returncode == 9 and "rank 1 (pid" in done.stderr and "exit status 9" in done.stderr
    assert time.monotonic() - begun < 15
    for file in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.read_text()), 0)


@pytest.mark.parametrize(("number", "name"), [(9, "SIGKILL"), (40, "40")])
def test_a_rank_ended_by_a_signal_sets_the_exit_status(number, name):
    """A real-time signal has no name in Python."""
    done = run("smddprun", "--nproc", "2", sys.executable, "-c", f"import os; os.kill(os.getpid(), {number})")
    assert done.returncode == 128 + number and f"by signal {name};" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_smddprun_ends_the_local_ranks(number, tmp_path):
    script = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.write(1, b'%d\\n' % os.getpid())\n"  # both write to one pipe: a line each, whole
        "time.sleep(60)\n"
    )
    command = [str(BIN / "smddprun"), "--nproc", "2", sys.executable, "-c", script]
    process = subprocess.Popen(command, env=clean(), stdout=subprocess.PIPE, text=True)
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.send_signal(number)
    assert process.wait(timeout=30) == 128 + number
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "a command is missing"),
        (["--nproc", "0", "true"], "from 1 to 4096, not '0'"),
        (["--nproc", "many", "true"], "not 'many'"),
        (["--gpus", "2", "true"], "unknown option --gpus"),
        (["-x"], "-x needs a value"),
        (["true"], "--nproc N"),
    ],
)
def test_an_invalid_command_line_is_reported(arguments, says):
    done = run("smddprun", *arguments)
    assert done.returncode == 2 and says in done.stderr, done.stderr


def test_an_invalid_environment_is_reported():
    done = run("smddprun", "true", OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
    assert done.returncode == 2 and "MASTER_ADDR is not set" in done.stderr


def test_the_historic_import_is_enough_under_mpirun():
    """Without smddprun: torch's variables come from Open MPI's."""
    script = "import smdistributed.dataparallel.torch.torch_smddp\n" + SUM
    ended = outputs(start(["-c", script], 2, openmpi))
    assert [status for status, _ in ended] == [0, 0], ended


def test_the_historic_import_sets_missing_launcher_variables():
    script = "import smdistributed.dataparallel.torch.torch_smddp"
    done = run("python", "-c", script, OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
    assert done.returncode == 0 and "MASTER_ADDR is not set" in done.stderr, done.stderr
    done = run("python", "-c", script, OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2", SMDDP_DEBUG="NONE")
    assert done.returncode == 0 and not done.stderr


def test_the_toolkit_finds_first_causes_only():
    script = (
        "from inspect import isclass\n"
        "from smdistributed.dataparallel import __version__, exceptions\n"
        "from smdistributed.modelparallel.backend import exceptions as of_v1\n"
        "def names(module): return sorted(n for n in dir(module) if isclass(getattr(module, n)))\n"
        "print(names(exceptions), names(of_v1) == names(exceptions), exceptions.PeerLostError.__name__, __version__)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=clean())
    expected = "['CollectiveTimeoutError', 'MismatchError', 'TopologyError'] True PeerLostError"
    assert done.stdout.startswith(expected), done.stdout + done.stderr


def test_the_version_is_that_of_the_package():
    from importlib.metadata import version

    done = run("smddprun", "--version")
    assert (done.returncode, done.stdout) == (0, f"smddprun {version('smddp')}\n"), done.stderr


def test_tagged_lines_name_their_rank_and_do_not_mix():
    script = (
        "import os, sys\n"
        "for i in range(200):\n"
        "    sys.stdout.write('a' * 50); sys.stdout.write(f'{i}\\n')\n"
        "sys.stderr.write(f'end of {os.environ[\"RANK\"]}')\n"
    )
    done = run("smddprun", "--nproc", "3", "--tag-output", sys.executable, "-c", script, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for rank in range(3):
        expected = [f"[{rank}] {'a' * 50}{i}" for i in range(200)]
        assert [line for line in lines if line.startswith(f"[{rank}] ")] == expected
    assert len(lines) == 600
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] end of {rank}" for rank in range(3)]


def test_tagged_output_ends_with_its_reader_and_keeps_all_lines_of_a_slow_one(tmp_path):
    script = "for i in range(5000): print('a' * 50, i)"
    program = f'{BIN / "smddprun"} --nproc 2 --tag-output {sys.executable} -c "{script}"'
    environment = {**clean(), "OMP_NUM_THREADS": "1"}
    shell = ("bash", "-c", f"{program} | head -n 1; echo status ${{PIPESTATUS[0]}}")
    closed = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60)
    # The ranks fail by their closed pipes, and the launcher reports that.
    assert closed.stdout.splitlines()[1:] == ["status 1"], closed
    assert "ended with exit status 1" in closed.stderr and "cannot start" not in closed.stderr, closed.stderr
    assert 'Traceback (most recent call last):\n  File "/' not in closed.stderr, closed.stderr
    slow = subprocess.run(f"{program} | (sleep 2; wc -l)", shell=True, env=environment, capture_output=True, timeout=60)
    assert int(slow.stdout) == 10_000, slow.stderr


def test_tagged_output_does_not_wait_for_a_process_that_a_rank_leaves_behind():
    script = "import subprocess, sys; print('x', end='', flush=True); subprocess.Popen(['sleep', '30'])"
    begun = time.monotonic()
    done = run("smddprun", "--nproc", "4", "--tag-output", sys.executable, "-c", script, OMP_NUM_THREADS="1")
    assert done.returncode == 0 and time.monotonic() - begun < 20
    assert sorted(done.stdout.split()) == sorted([word for rank in range(4) for word in (f"[{rank}]", "x")])


def test_tagged_output_is_refused_under_a_launcher():
    done = run("smddprun", "--tag-output", sys.executable, "-c", SHOW, **openmpi(0, 2, 0))
    assert done.returncode == 2 and "mpirun --tag-output" in done.stderr


def test_several_ranks_have_one_thread_each_unless_the_user_sets_the_number():
    # One write for each line: without buffers, the prints of two ranks may mix.
    show = "import os; os.write(1, (str(os.environ.get('OMP_NUM_THREADS')) + '\\n').encode())"
    for size, given, expected in ((2, {}, "1"), (2, {"OMP_NUM_THREADS": "3"}, "3"), (1, {}, "None")):
        unset = {name: value for name, value in clean().items() if name != "OMP_NUM_THREADS"}
        command = (str(BIN / "smddprun"), "--nproc", str(size), sys.executable, "-c", show)
        done = subprocess.run(command, env={**unset, **given}, capture_output=True, text=True, timeout=100)
        assert done.stdout.split() == [expected] * size, done.stderr
        assert ("OMP_NUM_THREADS=1 for each of 2 ranks" in done.stderr) == (size == 2 and not given)
