"""docs/reference/smp-config.md and smp-v1-config.md: the keys of `tsm.init`, `MoEConfig` and `smp.init`."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from dataclasses import fields
from types import ModuleType

import writer

#: Allowed values of MoEConfig's numbers; `MoEConfig` checks them.
_NOT_NEGATIVE = "0 or more"
MOE_SOURCE = "python/smddp/sagemaker/moe/moe_config.py"
V2_SOURCE = "python/smddp/smp/v2_keys.py"
V1_SOURCE = "python/smddp/smp/v1_keys.py"


def module_of(path: str) -> ModuleType:
    """Loads one file without its package, whose import may need torch."""
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), writer.ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def attributes(docstring: str) -> dict[str, str]:
    """Returns the entries of the section Attributes of a Google-style docstring."""
    section = inspect.cleandoc(docstring).partition("Attributes:\n")[2]
    lines: list[str] = []
    for line in section.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append(line)
    found = re.findall(r"^    (\w+): (.*(?:\n     +.*)*)", "\n".join(lines), re.M)
    return {name: " ".join(text.split()) for name, text in found}


def _allowed(kind: type, least: float | None, most: float | None = None, one_of: tuple[str, ...] = ()) -> str:
    if kind is bool:
        return "`True`, `False`"
    if one_of:
        return ", ".join(f"`{value}`" for value in one_of)
    if least is None:
        return "text" if kind is str else "any"
    return f"{least:g} or more" if most is None else f"{least:g} to {most:g}"


def _facts(kind: str, default: object, allowed: str) -> dict[str, object]:
    return {"type": kind, "default": f"`{default!r}`", "allowed": allowed}


def v2_page() -> str:
    from smddp.smp import v2_keys

    moe = module_of(MOE_SOURCE)
    config = moe.MoEConfig
    texts = attributes(config.__doc__)
    parts = [
        writer.paragraph(
            "`tsm.init(config)` takes a dictionary or the path of a JSON file. Degrees that the script assigned to "
            "`tsm.state` win over the launcher (`SM_HP_MP_PARAMETERS`, a JSON object), which wins over the argument of "
            "`init`. An unknown key raises ValueError with the nearest known key."
        ),
        "```python\nimport torch.sagemaker as tsm\n\n"
        'tsm.init({"hybrid_shard_degree": 2, "tensor_parallel_degree": 2})\n```\n\n',
        "## Keys of tsm.init\n\n",
    ]
    for key in v2_keys.KEYS.values():
        allowed = _allowed(key.type, key.least)
        facts = _facts(key.type.__name__, key.default, allowed)
        parts.append(writer.entry(key.name, writer.sentence(key.meaning), facts))
    parts.append("## Older names of keys\n\n")
    older = [(f"`{old}`", f"[{new}](#{new})") for old, new in v2_keys.OLDER_NAMES.items()]
    parts.append(writer.table(("older name", "key"), older))
    parts.append(
        writer.paragraph(
            "Keys of SMP v1, which launchers still send, log a warning and have no effect: "
            f"{', '.join(f'`{name}`' for name in sorted(v2_keys.V1_ONLY))}."
        )
    )
    parts.append("## Fields of MoEConfig\n\n")
    parts.append(
        writer.paragraph(
            "`tsm.transform(model, config=MoEConfig(...))` takes these fields. A value of the wrong type raises "
            "TypeError, one outside its range ValueError."
        )
    )
    for field in fields(config):
        kind = type(field.default)
        balancing = moe.LOAD_BALANCING if field.name == "moe_load_balancing" else ()
        allowed = _NOT_NEGATIVE if kind in (int, float) else _allowed(kind, None, one_of=balancing)
        name = f"MoEConfig.{field.name}" if field.name in v2_keys.KEYS else field.name
        parts.append(
            writer.entry(name, writer.sentence(texts[field.name]), _facts(kind.__name__, field.default, allowed))
        )
    parts.append(
        writer.links(
            ("torch.sagemaker: sharded training of transformers models", "../guides/smp/index.md"),
            ("Expert parallelism", "../guides/smp/expert-parallelism.md"),
        )
    )
    return writer.page("Configuration keys: tsm.init, MoEConfig", f"{V2_SOURCE} and {MOE_SOURCE}", *parts)


def v1_page() -> str:
    from smddp.smp import v1_keys

    names = {new: old for old, new in v1_keys.ALIASES.items()}
    parts = [
        writer.paragraph(
            "`smp.init(config)` takes a dictionary. The launcher (`SM_HP_MP_PARAMETERS`, a JSON object) wins over it. "
            "An unknown key raises ValueError with the nearest known key, an unsupported one NotImplementedError. "
            "Integers may be written as floats (`5e8`), `True` and `False` as 1 and 0."
        ),
        "```python\nimport smdistributed.modelparallel.torch as smp\n\n"
        'smp.init({"partitions": 2, "microbatches": 4, "ddp": True})\n```\n\n',
        "## Keys of smp.init\n\n",
    ]
    for name, field in v1_keys.KEYS.items():
        about = field.metadata
        allowed = _allowed(about["kind"], about["least"], about["most"], about["one_of"])
        if about["instead"]:
            allowed = f"`{field.default!r}` only"
        notes = [f"Other name: `{names[name]}`."] if name in names else []
        notes += [f"Not supported. Use instead: {about['instead']}."] if about["instead"] else []
        notes += [f"No effect: {about['no_effect']}. A value other than the default logs this."] * bool(
            about["no_effect"]
        )
        facts = _facts(about["kind"].__name__, field.default, allowed)
        parts.append(writer.entry(name, writer.sentence(about["meaning"]), facts, notes))
    parts.append(
        writer.links(
            ("Pipeline parallelism: smdistributed.modelparallel", "../guides/smp-v1/index.md"),
            ("From SageMaker model parallelism library v1", "../migrate/smp-v1.md"),
        )
    )
    return writer.page("Configuration keys: smp.init", V1_SOURCE, *parts)
