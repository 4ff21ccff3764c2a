"""Attention over the paged KV cache, one backend per kind of hardware."""

from minisgl.attention.selection import resolve_attention

__all__ = ["resolve_attention"]
