"""Names of gptneox's parameters: those of transformers."""

from smddp.modelparallel.names import same

translate_state_dict_to_hf_gptneox = same
translate_hf_state_dict_to_smdistributed_gptneox = same

__all__ = ["translate_hf_state_dict_to_smdistributed_gptneox", "translate_state_dict_to_hf_gptneox"]
