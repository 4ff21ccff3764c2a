"""Kernels for Hopper in CUDA C++. `kernels/triton/launch.py` imports them where they can run; nothing needs them."""
