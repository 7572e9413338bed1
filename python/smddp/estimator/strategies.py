"""Hyperparameters by which the SDK passes `distribution=` to the training toolkit."""

from __future__ import annotations

from typing import Any

from smddp.estimator.given import Given


def hyperparameters(given: Given) -> dict[str, Any]:
    """Returns the hyperparameters of the enabled strategies, as the training toolkit reads them."""
    found: dict[str, Any] = {}
    if given.distribution.get("instance_groups"):
        found["sagemaker_distribution_instance_groups"] = [
            group.instance_group_name for group in given.distribution["instance_groups"]
        ]
    # pytorchddp is the data parallel library's job by another name.
    parallel = given.distribution.get("pytorchddp")
    if parallel is None:
        parallel = given.of("smdistributed.dataparallel")
    if "parameter_server" in given.distribution:
        found["sagemaker_parameter_server_enabled"] = given.on("parameter_server")
    if "mpi" in given.distribution:
        found["sagemaker_mpi_enabled"] = given.on("mpi")
        if given.of("mpi").get("processes_per_host"):
            found["sagemaker_mpi_num_of_processes_per_host"] = given.of("mpi")["processes_per_host"]
        found["sagemaker_mpi_custom_mpi_options"] = given.of("mpi").get("custom_mpi_options", "")
    if "smdistributed" in given.distribution or "pytorchddp" in given.distribution:
        if given.parameters:
            found["mp_parameters"] = given.parameters
        found["sagemaker_distributed_dataparallel_enabled"] = parallel.get("enabled", False)
        found["sagemaker_instance_type"] = given.instance_type
        if parallel.get("enabled", False):
            found["sagemaker_distributed_dataparallel_custom_mpi_options"] = parallel.get("custom_mpi_options", "")
    if "multi_worker_mirrored_strategy" in given.distribution:
        found["sagemaker_multi_worker_mirrored_strategy_enabled"] = given.on("multi_worker_mirrored_strategy")
    if given.on("torch_distributed"):
        found["sagemaker_torch_distributed_enabled"] = True
        if given.instance_type is not None:
            found["sagemaker_instance_type"] = given.instance_type
        if "smdistributed" not in given.distribution:
            # Then nothing else counts.
            kept = ("sagemaker_torch_distributed_enabled", "sagemaker_instance_type")
            found = {name: value for name, value in found.items() if name in kept}
    return found
