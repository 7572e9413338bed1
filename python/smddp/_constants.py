"""Names that several packages share."""

# The backend's name in torch.distributed.
NAME = "smddp"
