"""Structured output: compiles grammars with llguidance, and follows them token by token. No torch."""
