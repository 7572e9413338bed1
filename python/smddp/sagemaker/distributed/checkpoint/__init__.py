"""Saving and loading of sharded state over torch's distributed checkpoint (DCP).

`state_dict_saver` and `state_dict_loader` move state dicts of any layout, `state_dict_utils` makes local ones, and
`hf` reads and writes Hugging Face's safetensors form.
"""

__all__: list[str] = []
