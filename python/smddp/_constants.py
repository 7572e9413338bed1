"""Names that several packages share."""

# The backend's name in torch.distributed.
NAME = "smddp"

# Oldest supported torch: major and minor version.
OLDEST_TORCH = (2, 8)
