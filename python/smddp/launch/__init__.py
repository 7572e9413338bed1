"""Launch programs (`smddprun` and its variants) and launchers' environment variables. Imports no torch."""
