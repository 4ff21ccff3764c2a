"""Decoders in Hugging Face's checkpoint formats."""
