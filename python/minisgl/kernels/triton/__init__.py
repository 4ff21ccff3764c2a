"""Kernels for NVIDIA GPUs, and the choice of a kernel for each size."""
