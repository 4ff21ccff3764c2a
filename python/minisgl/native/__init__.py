"""Runs a whole step on a CPU in one C++ call."""
