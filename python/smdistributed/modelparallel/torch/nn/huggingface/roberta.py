"""Names of roberta's parameters: those of transformers."""

from smddp.modelparallel.names import same

translate_state_dict_to_hf_roberta = same
translate_hf_state_dict_to_smdistributed_roberta = same

__all__ = ["translate_hf_state_dict_to_smdistributed_roberta", "translate_state_dict_to_hf_roberta"]
