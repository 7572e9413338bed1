"""Names of gptj's parameters: those of transformers."""

from smddp.modelparallel.names import same

translate_state_dict_to_hf_gptj = same
translate_hf_state_dict_to_smdistributed_gptj = same

__all__ = ["translate_hf_state_dict_to_smdistributed_gptj", "translate_state_dict_to_hf_gptj"]
