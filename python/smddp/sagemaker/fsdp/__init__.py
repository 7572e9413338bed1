"""All that depends on FSDP1 or FSDP2."""

__all__: list[str] = []
