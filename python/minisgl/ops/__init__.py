"""The op table, its reference in plain torch, and the CPU's ops."""
