"""Checkpoints on disk and snapshots in host memory."""
