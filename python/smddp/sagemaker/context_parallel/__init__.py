"""Context parallelism: the ranks of a context group hold parts of the same sequences, and attend over all of them.

A sequence of S tokens is cut into 2·cp chunks, and rank r holds chunks r and 2cp-r-1, so that every rank has as much
of the causal triangle to compute. What crosses between ranks is the keys and values of attention (`gather.py`,
`ring.py`), and once a forward pass what the masks and the loss need of the others' tokens (`inputs.py`).
"""

__all__: list[str] = []
