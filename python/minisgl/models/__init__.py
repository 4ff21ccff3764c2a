"""Decoders, their configurations, and the loading of Hugging Face checkpoints."""
