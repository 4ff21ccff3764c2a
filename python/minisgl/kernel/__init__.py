"""Ops: the reference in plain torch, faster versions by device, and the C++ of the host code."""
