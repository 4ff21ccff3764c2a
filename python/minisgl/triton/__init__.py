"""Kernels for NVIDIA GPUs, and the GEMMs that are chosen among them."""
