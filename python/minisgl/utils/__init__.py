"""Leaf helpers: errors, registries, devices, logging, ZMQ queues, checkpoint files. Imports nothing of minisgl."""
