"""The engine in a Python process, without server or sockets."""
