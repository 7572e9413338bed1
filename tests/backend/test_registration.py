"""Import, registration, historic names, and the console command, without rank processes."""

import importlib.util
import json
import os
import re
import subprocess
import sys

import smddp
from ranks import forked


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


def succeeds(code: str, **environment: str) -> str:
    done = python(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def succeeds_after_torch(code: str, **environment: str) -> str:
    """Runs the code after an import of torch."""
    done = forked.run(code, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_imports_without_torch():
    assert succeeds("import sys, smddp; print('torch' in sys.modules, 'smddp._core' in sys.modules)") == "False False"


def test_registration_starts_no_thread_and_opens_no_file():
    code = """
import os, threading, torch, torch.distributed
before = set(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))
import smdistributed.dataparallel.torch.torch_smddp
assert torch.distributed.is_backend_available('smddp')
print((set(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task'))) == before, threading.active_count())
"""
    assert succeeds(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "True 1"


def test_the_historic_import_registers_once_and_keeps_the_default():
    code = """
import torch.distributed as dist
before = dict(dist.Backend.default_device_backend_map)
import smdistributed.dataparallel.torch.torch_smddp
from smddp._register import register, autoload
register(); autoload()
print(dist.is_backend_available('smddp'), dist.Backend('SMDDP'), dist.Backend.default_device_backend_map == before)
"""
    assert succeeds(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0") == "True smddp True"


BROKEN_CORE = """
import sys, importlib.abc, warnings
class Broken(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == 'smddp._core':
            raise ModuleNotFoundError('libsomething.so is missing')
sys.meta_path.insert(0, Broken())
"""


def test_a_broken_core_is_an_import_error_with_its_reason():
    code = (
        BROKEN_CORE
        + """
import torch
try:
    import smdistributed.dataparallel.torch.torch_smddp
except ModuleNotFoundError:
    print('taken for absent')
except ImportError as error:
    print(error)
"""
    )
    said = succeeds(code)
    assert "libsomething.so is missing" in said and "taken for absent" not in said


def test_a_broken_core_does_not_break_import_torch():
    code = (
        BROKEN_CORE
        + """
import torch
from smddp._register import autoload
autoload()
import torch.distributed as dist
print(dist.is_backend_available('smddp'))
"""
    )
    assert succeeds(code) == "True"


def test_the_hook_of_import_torch_never_raises():
    code = """
import warnings, torch.distributed as dist
from smddp import _register
def fails(*args, **kwargs):
    raise RuntimeError('no room')
dist.Backend.register_backend = fails
dist.Backend._plugins.pop('SMDDP', None)
dist.Backend.backend_list = [name for name in dist.Backend.backend_list if name != 'smddp']
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    _register.autoload()
print(len(caught), 'no room' in str(caught[0].message))
"""
    assert succeeds_after_torch(code) == "1 True"


def test_a_torch_older_than_the_floor_is_refused_with_both_versions():
    code = """
import warnings, torch
from smddp import _register
messages = []
for version in ('2.7.1+cpu', '1.13.0', '2.8.0a0+git1234', '10.0'):
    torch.__version__ = torch.torch_version.TorchVersion(version)
    try:
        _register.register()
        messages.append('registered')
    except ImportError as error:
        messages.append(str(error))
torch.__version__ = '2.7.1'
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter('always')
    _register.autoload()
print(*messages, *(each.message for each in caught), sep='\\n')
"""
    old, older, built, newer, warned = succeeds_after_torch(code).splitlines()
    assert old == "smddp needs torch 2.8 or later, found torch 2.7.1+cpu. Update torch: pip install 'torch>=2.8'"
    assert "found torch 1.13.0." in older and (built, newer) == ("registered", "registered")
    assert "could not register" in warned and "found torch 2.7.1." in warned


def test_smdistributed_is_a_package_that_can_be_found():
    assert importlib.util.find_spec("smdistributed") is not None
    assert importlib.util.find_spec("smdistributed.dataparallel.torch.torch_smddp") is not None


def test_the_older_module_names_are_torchs():
    code = """
import torch
import smdistributed.dataparallel.torch.distributed as dist
from smdistributed.dataparallel.torch.parallel import DistributedDataParallel as first
from smdistributed.dataparallel.torch.parallel.distributed import DistributedDataParallel as second
from smdistributed.dataparallel import exceptions
import os, tempfile
dist.init_process_group(init_method='file://' + tempfile.mktemp(), rank=0, world_size=1)
tensor = torch.ones(2)
dist.all_reduce(tensor)
dist.barrier()
assert issubclass(exceptions.PeerLostError, RuntimeError)
print(first is second is torch.nn.parallel.DistributedDataParallel, dist.get_rank(), dist.get_world_size(),
      torch.distributed.get_backend(), dist.get_local_rank())
"""
    assert succeeds_after_torch(code, LOCAL_RANK="0") == "True 0 1 smddp 0"


def test_the_local_rank_must_come_from_a_launcher():
    code = """
import smdistributed.dataparallel.torch.distributed as dist
try:
    dist.get_local_rank()
except RuntimeError as error:
    print(error)
"""
    empty = dict.fromkeys(
        ("LOCAL_RANK", "SMDATAPARALLEL_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"), ""
    )
    assert "torchrun" in succeeds_after_torch(code, **empty)


def test_info_shows_the_path_of_every_collective():
    done = subprocess.run(
        [sys.executable, "-m", "smddp.tools.cli", "info", "--json"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert set(found["paths"]) >= {"all_gather", "reduce_scatter", "all_reduce", "barrier"}
    assert all(found["paths"]["all_gather"].values())
    assert any(name.startswith("SMDDP_") for name in found["settings"])
    # tests/cli checks the text.


#: Two ranks that make a barrier; the second is `late` seconds late.
TWO = """
import os, tempfile, time, torch.distributed as dist
from smddp._register import register
register()
store = tempfile.mktemp()
rank = 1 if os.fork() == 0 else 0
os.environ['RANK'] = str(rank)
dist.init_process_group('smddp', init_method='file://' + store, rank=rank, world_size=2)
time.sleep({late} * rank)
dist.barrier()
dist.destroy_process_group()
if rank == 1:
    os._exit(0)
os.wait()
"""


def test_the_debug_setting_logs_the_path_of_every_collective_once_per_group():
    done = forked.run(TWO.format(late=0), SMDDP_DEBUG="INFO")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "SMDDP INFO group" in line and "all_gather" in line]
    assert len(lines) == 1
    assert "reduce_scatter" in lines[0]


def test_log_lines_have_time_rank_and_level_and_name_the_late_rank():
    done = forked.run(TWO.format(late=3), SMDDP_DEBUG="TRACE")
    assert done.returncode == 0, done.stderr
    shape = re.compile(r"(20\d\d-\d\d-\d\dT[\d:]{8}\.\d{6}Z) (\S+):(\d+) \[([01?])\] SMDDP ([A-Z]+) (.+)")
    found = [shape.fullmatch(line) for line in done.stderr.splitlines()]
    assert all(found), done.stderr
    of_0 = [match.groups()[4:] for match in found if match[4] == "0"]
    assert sorted(match[1] for match in found if match[4] == "0") == [match[1] for match in found if match[4] == "0"]
    assert [text for level, text in of_0 if level == "VERSION"] == [f"version {smddp.__version__}"]
    (late,) = [text for level, text in of_0 if "has waited" in text]
    assert re.match(r"barrier #\d+ on group", late) and "missing: rank 1 (" in late, late
    traced = [text for level, text in of_0 if level == "TRACE" and text.startswith(late.split(" on ")[0])]
    assert [text.split("`")[2].split(":")[0] for text in traced] == [" begins", " ends"], traced


def test_nothing_is_logged_without_a_problem():
    code = "import smddp\nwith smddp.init() as comm:\n    comm.barrier()"
    assert python(code, SMDDP_DEBUG="WARN").stderr == ""


def test_the_function_info_knows_the_open_groups():
    code = """
import tempfile, torch, torch.distributed as dist, smddp
from smddp._register import register
register()
dist.init_process_group('smddp', init_method='file://' + tempfile.mktemp(), rank=0, world_size=1)
print([(group['rank'], group['size'], 'all_gather' in group['paths']) for group in smddp.info()['groups']])
dist.destroy_process_group()
print(smddp.info()['groups'])
"""
    assert succeeds_after_torch(code).splitlines() == ["[(0, 1, True)]", "[]"]
