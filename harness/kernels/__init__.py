"""Triton kernels (CUDA only) for memory-bound passes in which torch's kernels stay below memory bandwidth."""
