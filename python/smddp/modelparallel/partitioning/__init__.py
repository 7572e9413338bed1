"""The assignment of modules to pipeline stages."""
