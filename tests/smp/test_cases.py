"""`torch.sagemaker` on four ranks: every function `case_*` of the modules in `smp_cases/`, run by one pool of ranks.

SMDDP_TEST_BACKEND names the backend (default: smddp).
"""

from __future__ import annotations

from pathlib import Path

from ranks.cases import each_case

# Modules whose imports alone take long on two cores.
SLOW = ("trainer_tensor_parallel",)


@each_case(Path(__file__).with_name("smp_cases"), SLOW)
def test_case(ranks, module, function):
    ranks.run(f"smp_cases.{module}", function, seconds=180.0)
