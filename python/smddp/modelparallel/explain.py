"""`smp.explain()`: the cut as a table."""

from __future__ import annotations

from smddp.modelparallel import schedule
from smddp.modelparallel.state import state


def explain() -> str:
    """Which module lies where, with parameters and share of the cost, and the bubble that the plan leaves.

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
    return "\n".join(lines)
