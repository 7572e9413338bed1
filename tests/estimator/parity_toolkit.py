"""Prints the real training toolkit's variables and command for one job as JSON. Its own interpreter runs this.

SAGEMAKER_BASE_DIR names the folder that `parity_cases.service_files` has filled.
"""

import json

from sagemaker_training import environment, params, process, runner

# The host's hardware, fixed so that any machine records the same values.
environment.num_gpus = lambda: 8 if "p4d" in environment.read_resource_config()["current_instance_type"] else 0
environment.num_cpus = lambda: 2
environment.validate_smddprun = environment.validate_smddpmprun = lambda: True
KINDS = {
    params.MPI_ENABLED: runner.RunnerType.MPI,
    "sagemaker_distributed_dataparallel_enabled": runner.RunnerType.SMDataParallel,
    "sagemaker_torch_distributed_enabled": runner.RunnerType.TorchDistributed,
}

env = environment.Environment()
enabled = [kind for name, kind in KINDS.items() if env.additional_framework_parameters.get(name)]
kind = enabled[0] if enabled else runner.RunnerType.Process
variables = env.to_env_vars()
started = runner.get(kind, env.user_entry_point, env.to_cmd_args(), variables)
if kind is runner.RunnerType.TorchDistributed:
    words = started._create_command()
    words = words[words.index(env.user_entry_point) :]
else:
    # The part of a rank, without the words of mpirun.
    words = process.ProcessRunner._create_command(started)
print(json.dumps({"variables": variables, "command": words}))
