"""The end of a process: shutdown of its groups, uncaught exceptions, peer failures. Imports no torch."""
