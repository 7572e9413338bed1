"""Names of gpt2's parameters: those of transformers."""

from smddp.modelparallel.names import same

translate_state_dict_to_hf_gpt2 = same
translate_hf_state_dict_to_smdistributed_gpt2 = same

__all__ = ["translate_hf_state_dict_to_smdistributed_gpt2", "translate_state_dict_to_hf_gpt2"]
