"""The devices: CPU and CUDA GPUs, and what the machine has, without torch."""
