"""Instance types: their names, their numbers of GPUs, and which have EFA."""

from __future__ import annotations

from smddp.text import nearest

_G5 = {
    **dict.fromkeys(("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge"), 1),
    **dict.fromkeys(("12xlarge", "24xlarge"), 4),
    "48xlarge": 8,
}
_FAMILIES = {
    "ml.p2": {"xlarge": 1, "8xlarge": 8, "16xlarge": 16},
    "ml.p3": {"2xlarge": 1, "8xlarge": 4, "16xlarge": 8},
    "ml.p3dn": {"24xlarge": 8},
    "ml.p4d": {"24xlarge": 8},
    "ml.p4de": {"24xlarge": 8},
    "ml.p5": {"4xlarge": 1, "48xlarge": 8},
    "ml.p5e": {"48xlarge": 8},
    "ml.p5en": {"48xlarge": 8},
    "ml.p6-b200": {"48xlarge": 8},
    "ml.p6-b300": {"48xlarge": 8},
    "ml.p6e-gb200": {"36xlarge": 4},
    "ml.g4dn": {"xlarge": 1, "2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 4, "16xlarge": 1},
    "ml.g5": _G5,
    "ml.g6": _G5,
    "ml.g6e": _G5,
    "ml.g7": (_G7 := {"2xlarge": 1, "4xlarge": 1, "8xlarge": 1, "12xlarge": 2, "24xlarge": 4, "48xlarge": 8}),
    "ml.g7e": _G7,
}
GPUS = {f"{family}.{size}": gpus for family, sizes in _FAMILIES.items() for size, gpus in sizes.items()}
#: Families without GPUs, and Trainium's; their sizes are among `_SIZES`.
_OTHERS = (
    "c4 c5 c5n c6i c7i c7i-flex c8i c8i-flex m4 m5 m5d m6i m7i m7i-flex m8i m8i-flex r5 r5d r6i r7i r8i r8i-flex t3 "
    "trn1 trn1n trn2"
).split()
_SIZES = ("medium", "large", "xlarge", *(f"{number}xlarge" for number in (2, 4, 8, 9, 10, 12, 16, 18, 24, 32, 48, 96)))
_TYPES = frozenset(("local", "local_gpu", *GPUS, *(f"ml.{family}.{size}" for family in _OTHERS for size in _SIZES)))

#: Instance types for which the training toolkit enables EFA; EFA_RDMA: those with RDMA from GPU memory.
EFA_RDMA = frozenset(
    "ml.p4d.24xlarge ml.p4de.24xlarge ml.p5.48xlarge ml.p5e.48xlarge ml.trn1.32xlarge ml.p6e-gb200.36xlarge".split()
)
EFA = EFA_RDMA | frozenset("ml.g4dn.8xlarge ml.g4dn.12xlarge ml.g5.48xlarge ml.p3dn.24xlarge".split())
_NO_EFA = ("local", "local_gpu", "ml.p2.", "ml.p3.")


def unknown(instance_type: str) -> str | None:
    """Returns what is wrong with an unknown instance type, with the nearest known one; None for a known type."""
    if instance_type in _TYPES:
        return None
    family = [name for name in _TYPES if name.startswith(instance_type.rpartition(".")[0] + ".")]
    found = nearest(instance_type, sorted(family or _TYPES)) or "ml.p4d.24xlarge"
    return (
        f"{instance_type!r} is unknown, and so is its number of ranks; the nearest known type is {found!r}. For a type "
        "that is missing here give 'local' and the number of ranks: fit(processes_per_host=N), or processes_per_host "
        "of 'mpi'"
    )


def gpus(instance_type: str | None) -> int | None:
    """GPUs of an instance type; of this machine for "local" and "local_gpu"; None where that is not known."""
    if instance_type in ("local", "local_gpu"):
        from smddp.launch.local import count_devices

        return count_devices() or None
    return GPUS.get(instance_type or "")


def lacks_efa(instance_type: str | None) -> bool:
    """Returns whether this type is known to lack EFA."""
    name = instance_type or ""
    small = name.startswith("ml.g") and name.endswith((".xlarge", ".2xlarge", ".4xlarge"))
    return small or name.startswith(_NO_EFA)


def is_trainium(instance_type: str | None) -> bool:
    return (instance_type or "").startswith("ml.trn")
