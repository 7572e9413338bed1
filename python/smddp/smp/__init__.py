"""Rules of the SMP configuration: keys of SMP v2, layout arithmetic, and launcher parameters.

Imports no torch and no other package of smddp.
"""

__all__: list[str] = []
