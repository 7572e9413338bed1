"""Launch programs (`smddprun` and its variants) and launchers' environment variables.

Imports no torch and no other package of smddp.
"""

__all__: list[str] = []
