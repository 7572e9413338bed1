"""Names of gptneo's parameters: those of transformers."""

from smddp.modelparallel.names import same

translate_state_dict_to_hf_gptneo = same
translate_hf_state_dict_to_smdistributed_gptneo = same

__all__ = ["translate_hf_state_dict_to_smdistributed_gptneo", "translate_state_dict_to_hf_gptneo"]
