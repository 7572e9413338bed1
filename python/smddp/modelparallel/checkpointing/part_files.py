"""`smp.save` and `smp.load`: single objects, or one file for each part of the model.

FILE_{pp_rank}_{tp_rank}                partial=True
FILE_{pp_rank}_{tp_rank}_{rdp_rank}     partial=True, v3=True; of a sharded model the last number is the shard
FILE                                    partial=False
"""

from __future__ import annotations

import logging
import os
import pickle
from pathlib import Path
from typing import Any

import torch

from smddp.modelparallel.data_parallel import sharded
from smddp.modelparallel.state import state

log = logging.getLogger("smddp.modelparallel")


def save(obj: Any, f: str | os.PathLike[str], partial: bool = True, v3: bool = False, **torch_save: Any) -> None:
    """torch.save to ``f``, or with ``partial`` to one file for each part of the model.

    Every process that calls it writes: let one replica do so (``smp.rdp_rank() == 0``), and with ``v3`` each.

    Args:
        obj: any object that pickle takes.
        f: the file; its partial files are ``f_{pp_rank}_{tp_rank}``.
        v3: to ``f_{pp_rank}_{tp_rank}_{rdp_rank}``: each replica has its share of an optimizer's state.
        torch_save: keyword arguments of torch.save, such as ``pickle_module`` and ``pickle_protocol``.
    """
    path = Path(f)
    if partial:
        _, ranks = state.made("save()")
        place, shared = f"{ranks.pp_rank}_{ranks.tp_rank}", sharded.of(state.model)
        if v3 or shared is not None:
            place = f"{place}_{ranks.rdp_rank if shared is None else shared.rank}"
        path = Path(f"{os.fspath(f)}_{place}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another name, then a rename: a reader never sees half of a file.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(obj, unfinished, **torch_save)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def load(
    f: str | os.PathLike[str],
    map_location: Any = None,
    partial: bool = True,
    back_compat: bool = False,
    **torch_load: Any,
) -> Any:
    """Load the object that `save` wrote to ``f``, or with ``partial`` this rank's object.

    torch.load reads files of tensors and plain values. A file with objects of other classes is unpickled, which runs
    code of the file, and a warning says so: load only files that you trust, or give ``weights_only=True``.

    Args:
        map_location: as of torch.load.
        back_compat: accepted; the names of earlier versions are found without it.
        torch_load: keyword arguments of torch.load. With ``weights_only`` or ``pickle_module`` its rules hold alone.

    Raises FileNotFoundError if no file of this rank exists.
    """
    path = _found(f) if partial else Path(f)
    if torch_load.keys() & {"weights_only", "pickle_module"}:
        return torch.load(path, map_location=map_location, **torch_load)
    try:
        return torch.load(path, map_location=map_location, weights_only=True, **torch_load)
    except pickle.UnpicklingError:
        log.warning(
            "smp.load(): %s holds more than tensors and plain values, so it is unpickled, which can run code. Load "
            "only files that you trust; weights_only=True refuses them",
            path,
        )
    return torch.load(path, map_location=map_location, weights_only=False, **torch_load)


def _found(f: str | os.PathLike[str]) -> Path:
    """Return this rank's partial file of ``f``."""
    cfg, ranks = state.made("load()")
    shared = sharded.of(state.model)
    place, replica = f"{ranks.pp_rank}_{ranks.tp_rank}", ranks.rdp_rank if shared is None else shared.rank
    own, parts = [f"{place}_{replica}"], [place]
    if ranks.tp_size == 1:  # names of earlier versions
        own.append(f"{ranks.mp_rank}_{replica}")
        parts.append(str(ranks.mp_rank))
    # Only the state of an optimizer that replicas share differs between these.
    names = own + parts if shared is not None or cfg.shard_optimizer_state else parts + own[:1] + [f"{place}_0"]
    paths = [Path(f"{os.fspath(f)}_{name}") for name in names]
    for path in paths:
        if path.exists():
            return path
    others = ", ".join(each.name for each in paths[1:])
    raise FileNotFoundError(
        f"smp.load(partial=True) on rank {ranks.rank}: no file {paths[0]}, nor {others}. Load under the degrees of the "
        "save, or a whole file with partial=False"
    )
