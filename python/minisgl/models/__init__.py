"""Decoders in Hugging Face's checkpoint formats."""

from minisgl.models.weight import load_model

__all__ = ["load_model"]
