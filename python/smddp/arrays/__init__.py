"""Groups of ranks on numpy arrays and DLPack buffers. Imports no torch."""
