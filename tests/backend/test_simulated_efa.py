"""The backend's tests under EFA's rules: processes on two simulated nodes, over a libfabric that behaves like EFA's.

The library refuses violations and reports them on standard error, which must be empty.
"""

from __future__ import annotations

import pytest
from hosts import wires
from ranks.pool import Pool

from backend.every_case import ONE_NODE, all_cases, sizes_across

QUICK = {
    "test_all_gather_into_tensor_puts_each_block_in_its_place",
    "test_all_to_all_single_takes_uneven_splits_and_shaped_rows",
    "test_large_and_empty_reductions",
    "test_messages_go_round_in_every_type_and_size",
    "test_overlapping_groups_work_side_by_side",
}
NOT_ACROSS = ONE_NODE | {"test_half_precision_sums_round_once": "sums across nodes of several ranks round once a level"}
# Also older devices: without writes, or with a receive buffer per write with immediate data.
DEVICES = {"": {}, "reads": {"FAKE_EFA_EMULATED_WRITE": "1"}, "takes": {"FAKE_EFA_DATA_CONSUMES_BUFFER": "1"}}


def _cases() -> list:
    found = []
    for device in DEVICES:
        for module, name, test in all_cases():
            sizes = sizes_across(test.sizes, [3, 4])
            for size in sizes:
                quick = name in QUICK and size == sizes[-1] and (not device or "large" in name)
                marks = [] if quick else [pytest.mark.slow]
                values = (device, size, module, name, test.seconds)
                found.append(pytest.param(*values, marks=marks, id="-".join(filter(None, (device, str(size), name)))))
    # One pool at a time.
    return sorted(found, key=lambda param: param.values[:2])


@pytest.fixture(scope="module")
def efa_pool():
    """Returns a function that returns the pool of `size` ranks over a device. One at a time."""
    kept: dict = {}

    def of(device: str, size: int) -> Pool:
        if (device, size) not in kept:
            close()
            settings = {**wires.settings("efa"), **DEVICES[device]}
            kept[device, size] = Pool(size, lambda rank: {**settings, "SMDDP_NODE": f"node{rank % 2}"})
        return kept[device, size]

    def close() -> None:
        broken = [
            line for pool in kept.values() for line in pool.output().splitlines() if line.startswith("fake EFA: ")
        ]
        for pool in kept.values():
            pool.close()
        kept.clear()
        assert not broken, broken

    yield of
    close()


@pytest.mark.parametrize(("device", "size", "module", "name", "seconds"), _cases())
def test_backend(efa_pool, device, size, module, name, seconds) -> None:
    if reason := NOT_ACROSS.get(name):
        pytest.skip(reason)
    efa_pool(device, size).run(module, name, seconds)
