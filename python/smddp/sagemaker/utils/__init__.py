"""Small helpers that training scripts import one by one."""
