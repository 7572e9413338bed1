"""Importing this makes `torch.distributed.init_process_group(backend="smddp")` work.

Needed only where torch's own discovery of backends is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0) or absent; it
does no harm elsewhere. It also loads the native core, so that a script which falls back to another backend
on ModuleNotFoundError gets an ImportError, with the reason, from an installation that cannot run. Where mpirun or srun
started this process, torch's variables (RANK, WORLD_SIZE, ...) are set from theirs.
"""

from smddp._native import core as _core
from smddp._register import register as _register
from smddp.launch.environment import complete as _complete
from smddp.observability import log as _log

_core()
_register()
try:
    _complete()
except _core().ConfigError as _error:
    # init_process_group may be given all that is missing here.
    _log.warning(f"torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...) are not set from the launcher's: {_error}")
