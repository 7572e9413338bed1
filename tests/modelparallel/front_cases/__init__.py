"""Cases for the ranks of `tests/modelparallel/test_front_cases.py`."""
