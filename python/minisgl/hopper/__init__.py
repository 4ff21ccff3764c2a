"""Kernels for Hopper in CUDA C++. `triton/launch.py: hopper` imports them where they can run; nothing needs them."""
