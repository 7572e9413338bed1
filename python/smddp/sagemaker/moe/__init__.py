"""Mixture of experts: configurations and classes that scripts name. Expert parallelism does not run yet."""
