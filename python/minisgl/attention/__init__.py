"""Attention over the paged KV cache: the backends, and the choice between them."""

from minisgl.attention.selection import resolve_attention

__all__ = ["resolve_attention"]
