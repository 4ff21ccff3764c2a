"""The devices: the CPU, CUDA GPUs, and the driver check that needs no torch."""
