"""Kernels written in Triton, for NVIDIA GPUs."""
