"""All that depends on FSDP1 or FSDP2."""
