"""Checks of GPUs."""

from __future__ import annotations

from smddp.tools.doctor.finding import Facts, Finding, fail, of_rank, ok, warn


@of_rank("GPU")
def gpu(facts: Facts) -> Finding:
    cuda, local = facts["cuda"], facts["launch"]["local size"]
    if cuda is None:
        return warn(
            "the CUDA driver was not queried, or did not answer", "CUDA tensors may not be supported", "nvidia-smi"
        )
    files = [device for device in facts["devices"] if "nvidia" in device]
    if not cuda["found"]:
        if files:
            return fail(
                f"{', '.join(files)} exist, but {cuda['why']}",
                "CUDA tensors are not supported",
                "start the container with the GPUs' libraries (--gpus all), or name libcuda in SMDDP_CUDA_LIBRARY",
            )
        return ok("none: no CUDA driver and no device")
    found = f"CUDA driver {cuda['driver']}: {'; '.join(cuda['devices']) or 'no device'}"
    if 0 < len(cuda["devices"]) < local:
        return warn(
            f"{found}; {local} ranks on this host",
            "ranks share a device, and copies between them take turns",
            f"start {len(cuda['devices'])} ranks on this host",
        )
    return ok(found)


@of_rank("GPU paths")
def gpu_paths(facts: Facts) -> Finding:
    cuda = facts["cuda"]
    if not cuda or not cuda["found"]:
        return ok("none")
    path = facts["settings"].get("SMDDP_CUDA_PATH", {}).get("value", "auto")
    if path == "host":
        return warn(
            "SMDDP_CUDA_PATH=host: all through pinned host memory",
            "nothing is read from the peers' memory by CUDA IPC",
            "unset it where the GPUs of a node reach each other",
        )
    return ok("; ".join(f"{where}: {way}" for where, way in cuda["paths"].items()))
