"""The engine inside one Python process, without server or sockets."""
