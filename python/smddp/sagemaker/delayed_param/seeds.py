"""Random streams that depend on a name only, not on the rank or earlier random numbers."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def seed_of(random_seed: int, *names: str) -> int:
    """Returns a 63-bit seed derived from the seed and the names."""
    text = "\0".join((str(random_seed), *names)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def seeded(device: torch.device, random_seed: int, *names: str) -> Iterator[None]:
    """Temporarily seeds the generators of the CPU and ``device`` by (seed, names); restores them on exit."""
    seed = seed_of(random_seed, *names)
    engine = torch.get_device_module(device.type) if device.type != "cpu" else None
    before_cpu = torch.get_rng_state()
    before = engine.get_rng_state(device) if engine is not None else None
    try:
        # Not torch.manual_seed, which would also change the generators of all other devices.
        torch.default_generator.manual_seed(seed)
        if engine is not None:
            engine.default_generators[device.index].manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(before_cpu)
        if engine is not None:
            engine.set_rng_state(before, device)
