"""The whole step of a CPU in one C++ call."""
