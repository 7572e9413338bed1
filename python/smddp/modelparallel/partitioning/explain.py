"""`smp.explain()`: the cut as a table, the plan as a drawing, and a step as it was planned and measured."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from smddp import files
from smddp.modelparallel.pipeline import schedule
from smddp.modelparallel.pipeline import timeline as steps
from smddp.modelparallel.state import state
from smddp.observability import timeline


def explain(trace: str | os.PathLike[str] | None = None) -> str:
    """Report the stage, parameters and cost share of each module, and the plan with its bubble.

    Args:
        trace: a file to write with the last step of this pipeline's stages, each as planned and as measured: a picture
            if its name ends in ``.svg``, else a trace for Perfetto or chrome://tracing. Collective over the pipeline;
            the first replica's first stage writes.

    Raises RuntimeError before the first step, which cuts the model.
    """
    cfg, ranks = state.made("explain()")
    model = state.model
    if model is None or not model.partitioned:
        raise RuntimeError("smp.explain(): the model is cut by the first step")
    assert cfg.active_microbatches is not None  # as the configuration fills it in
    shapes = model.parameter_shapes
    costs = {unit.name: unit.cost for unit in model.units}
    rows = [("module", "stage", "parameters", "cost")]
    total: list[list[float]] = [[0, 0.0] for _ in range(ranks.pp_size)]
    counted: set[int] = set()
    for name, stage in sorted(model.where.items(), key=lambda item: item[1]):
        prefix = f"{name}." if name else ""
        count = 0
        for key, parameter in model.module.named_parameters(remove_duplicate=False):
            if key.startswith(prefix) and id(parameter) not in counted:
                counted.add(id(parameter))
                elements = 1
                for extent in shapes[key]:
                    elements *= extent
                count += elements
        cost = sum(share for unit, share in costs.items() if unit == name or unit.startswith(prefix))
        total[stage][0] += count
        total[stage][1] += cost
        rows.append((name or type(model.module).__name__, str(stage), f"{count:,}", f"{100 * cost:.1f} %"))
    for stage, (elements_of, share_of) in enumerate(total):
        rows.append((f"all of stage {stage}", str(stage), f"{elements_of:,}", f"{100 * share_of:.1f} %"))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]:>{widths[3]}}" for row in rows
    ]
    m = cfg.microbatches
    plan = schedule.simulate(list(range(ranks.pp_size)), m, cfg.pipeline, cfg.active_microbatches)
    bubble = 1 - m * 3.0 / plan.length
    lines.append(
        f"{ranks.pp_size} stages, {m} microbatches, {cfg.pipeline}: {100 * bubble:.1f} % bubble in even stages"
    )
    if ranks.pp_size > 1:
        lines += [
            "in time, digits forward, letters backward (a is microbatch 0):",
            *steps.drawn(plan, ranks.pp_size),
        ]
    if trace is not None:
        _write(Path(trace), cfg, ranks, model.measured.pieces)
    return "\n".join(lines)


def _write(file: Path, cfg: Any, ranks: Any, pieces: list[steps.Piece]) -> None:
    # Of the stages of one host the times are of one clock.
    clock = time.time() - time.perf_counter()
    own = [(what, number, begin + clock, end + clock) for what, number, begin, end in pieces]
    gathered: list[Any] = [None] * ranks.pp_size
    name = f"stage {ranks.pp_rank} (rank {ranks.rank}, host {socket.gethostname()})"
    dist.all_gather_object(gathered, (name, own), group=ranks.pp_group)
    if ranks.pp_rank or ranks.rdp_rank:
        return

    def simulate(visits: list[int], forward: float, backward: float, shares: list[float]) -> schedule.Simulated:
        return schedule.simulate(
            visits, cfg.microbatches, cfg.pipeline, cfg.active_microbatches, forward, backward, shares
        )

    found = steps.trace([name for name, _ in gathered], [own for _, own in gathered], simulate)
    files.write_text(file, timeline.drawn(found) if file.suffix == ".svg" else json.dumps(found))
