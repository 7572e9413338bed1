"""Translators of roberta's state dicts: parameters keep transformers' names."""

from smddp.modelparallel.names import translators

globals().update(translators("roberta"))
