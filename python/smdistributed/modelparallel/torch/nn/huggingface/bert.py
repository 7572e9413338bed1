"""Names of bert's parameters: those of transformers."""

from smddp.modelparallel.names import same

translate_state_dict_to_hf_bert = same
translate_hf_state_dict_to_smdistributed_bert = same

__all__ = ["translate_hf_state_dict_to_smdistributed_bert", "translate_state_dict_to_hf_bert"]
