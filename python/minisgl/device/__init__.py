"""The devices: CPU and CUDA GPUs, and the check for a driver without torch."""
