"""Kernels for NVIDIA GPUs: in Triton, and for Hopper in CUDA C++."""
