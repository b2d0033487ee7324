"""Passes over a rank's own tensors for which torch has no kernel as fast as memory, in Triton, on CUDA alone."""
