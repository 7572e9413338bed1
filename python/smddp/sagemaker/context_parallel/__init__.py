"""Context parallelism: names that scripts import. It does not run yet."""
