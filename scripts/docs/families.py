"""docs/reference/model-families.md: transformers models that `tsm.transform` shards, by `model_type`.

Plans of smddp are those of `hf_plans.py`. `families.json` lists the plans of transformers that the tests compared with
one process, and the models that `transform` refuses.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import config_keys
import writer

PLANS = "python/smddp/sagemaker/hf_plans.py"
EXPERTS = "python/smddp/sagemaker/expert_parallel/families.py"
DATA = "scripts/docs/families.json"


def expert_classes() -> list[str]:
    """Returns the layer classes of `FAMILIES`, without an import of torch."""
    tree = ast.parse((writer.ROOT / EXPERTS).read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "FAMILIES":
            assert isinstance(node.value, ast.Dict)
            return [str(ast.literal_eval(key)) for key in node.value.keys if key is not None]
    raise SystemExit(f"{EXPERTS} has no FAMILIES")


def _model(name: str) -> str:
    return name if " " in name else f"`{name}`"


def page() -> str:
    data = json.loads(Path(writer.ROOT / DATA).read_text(encoding="utf-8"))
    ours = config_keys.module_of(PLANS).PLANS
    rows = [(name, "smddp", data["smddp"]) for name in ours]
    for group in data["transformers"]:
        rows += [(name, "transformers", group["versions"]) for name in group["families"] if name not in ours]
    rows.sort()
    parts = [
        writer.paragraph(
            "`tsm.transform(model)` shards these models by `config.model_type`: base models, heads and encoders. The "
            "plan comes from smddp or from the model's class in transformers. Tests compare each plan of "
            "transformers with one process, in the versions of the table."
        ),
        "```python\nmodel = tsm.transform(model)                                      # a family of this page\n"
        'model = tsm.transform(model, config={"tp_plan": {"blocks.*.up": "colwise"}})   # any other module\n```\n\n',
        "## Tensor parallelism\n\n",
        writer.table(
            ("model_type", "plan from", "transformers"),
            [(f"`{name}`", source, versions) for name, source, versions in rows],
        ),
        "## Expert parallelism\n\n",
        writer.paragraph(f"Layer classes: {', '.join(f'`{name}`' for name in expert_classes())}."),
        "## Models that transform refuses\n\n",
        writer.table(
            ("reason", "models", "remedy"),
            [(row["reason"], ", ".join(map(_model, row["families"])) or "-", row["remedy"]) for row in data["refused"]],
        ),
        writer.paragraph(
            "`make test-smp-full` creates a tiny model of every causal class of the installed transformers. Each one "
            "trains as one process does at degree 2, or `transform` refuses it."
        ),
        writer.links(
            ("Tensor parallelism", "../guides/smp/tensor-parallelism.md"),
            ("Expert parallelism", "../guides/smp/expert-parallelism.md"),
            ("Context parallelism", "../guides/smp/context-parallelism.md"),
        ),
    ]
    return writer.page("Supported model families of torch.sagemaker", f"{PLANS}, {EXPERTS} and {DATA}", *parts)
