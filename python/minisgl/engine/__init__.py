"""Runs one model on one device: plans in, tokens out."""
