"""Every symbol of SMP v1 under the name that scripts use, and the scripts in docs/guides/smp-v1."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch.distributed as dist

PAGES = Path(__file__).parents[2] / "docs" / "guides" / "smp-v1"
SCRIPT = re.compile(r"^<!-- a script for (\d+) ranks -->\n```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

SYMBOLS = {
    "": """init is_initialized rank size local_rank local_size tp_rank tp_size pp_rank pp_size rdp_rank rdp_size mp_rank
        mp_size dp_rank dp_size get_world_process_group get_tp_process_group get_pp_process_group get_rdp_process_group
        get_mp_process_group get_dp_process_group get_mp_group get_dp_group step StepOutput DistributedModel
        DistributedOptimizer partition set_partition explain set_activation_checkpointing broadcast recv_from send
        allgather barrier dp_barrier mp_barrier CommGroup RankType save load save_checkpoint resume_from_checkpoint
        tensor_parallelism set_tensor_parallelism model_creation delay_param_initialization tp_register
        tp_register_with_module amp nn optimizers patches model state""",
    "model": "DistributedModel",
    "amp": "GradScaler",
    "optimizers": "FusedLAMB FusedLamb FusedNovoGrad",
    "patches.checkpoint": "checkpoint checkpoint_sequential",
    "nn.huggingface.gpt2": "translate_state_dict_to_hf_gpt2 translate_hf_state_dict_to_smdistributed_gpt2",
    "nn": """FusedLayerNorm DistributedLinear DistributedTransformerLMHead DistributedTransformer
        DistributedTransformerLayer DistributedAttentionLayer DistributedTransformerOutputLayer DistributedEmbedding
        FlashAttentionLayer""",
}


@pytest.mark.parametrize("module", SYMBOLS)
def test_a_modules_symbols_import_as_scripts_import_them(module):
    found = importlib.import_module("smdistributed.modelparallel.torch" + f".{module}" * bool(module))
    for name in SYMBOLS[module].split():
        assert hasattr(found, name), f"smdistributed.modelparallel.torch.{module}.{name}"


def test_step_is_the_decorator_whatever_else_is_imported():
    import smddp.modelparallel.step
    import smdistributed.modelparallel.torch as smp

    assert callable(smp.step) and smp.step is smddp.modelparallel.step.step


def test_every_function_and_class_has_a_docstring():
    # The reference page is generated from these.
    import smdistributed.modelparallel.torch as smp

    found = {name: getattr(smp, name) for name in smp.__all__}
    undocumented = [name for name, value in found.items() if callable(value) and not (value.__doc__ or "").strip()]
    assert undocumented == []


def scripts() -> list:
    found = [(page.stem, match) for page in sorted(PAGES.glob("*.md")) for match in SCRIPT.findall(page.read_text())]
    return [pytest.param(int(ranks), code, id=page) for page, (ranks, code) in found]


def test_pages_on_pipelines_and_tensor_parallelism_hold_a_script():
    assert [script.id for script in scripts()] == ["index", "tensor-parallelism"]


@pytest.mark.parametrize(("size", "code"), scripts())
def test_a_script_of_the_pages_runs_as_written(ranks, size, code, tmp_path):
    assert size == ranks.size
    script = tmp_path / "script.py"
    script.write_text(code + "\nassert loss.ndim == 0 and number == 2\n")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    library = "smddp.modelparallel.state"
    ranks.run("ranks.script", "as_torchrun_would", path=str(script), port=store.port, library=library)
