"""Attention over the paged KV cache: the backends, and the choice between them."""
