"""Importing this makes `torch.distributed.init_process_group(backend="smddp")` work.

Needed only where torch's own discovery of backends is off (TORCH_DEVICE_BACKEND_AUTOLOAD=0) or absent; it
does no harm elsewhere. It also loads the native core, so that a script which falls back to another backend
on ModuleNotFoundError gets an ImportError, with the reason, from an installation that cannot run.
"""

from smddp._native import core as _core
from smddp._register import register as _register

_core()
_register()
