"""Names and housekeeping of checkpoint folders. Saving and loading is in `distributed.checkpoint`."""
