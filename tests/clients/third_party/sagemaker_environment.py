"""The environment of a SageMaker data-parallel job, on a machine without GPU.

Imported first by the accelerate and transformers scripts, before torch. Their SageMaker mode takes
for granted that there are GPUs; two things stand in for them here, both outside the backend:
ACCELERATE_TORCH_DEVICE names the device, and DDP drops `device_ids`, which it refuses for modules on
CPU.
"""

import os
import sys

if os.environ.get("SMDDP_TEST_BACKEND") == "gloo":
    sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "gloo_as_smddp"))

os.environ.update(
    SM_FRAMEWORK_PARAMS='{"sagemaker_distributed_dataparallel_enabled": true}',
    SMDATAPARALLEL_LOCAL_RANK=os.environ["LOCAL_RANK"],
    ACCELERATE_USE_SAGEMAKER="true",
    ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE="DATA_PARALLEL",
)

import torch

if not torch.cuda.is_available():
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

    class _DDP(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module, device_ids=None, output_device=None, **options):
            super().__init__(module, **options)

    torch.nn.parallel.DistributedDataParallel = _DDP
