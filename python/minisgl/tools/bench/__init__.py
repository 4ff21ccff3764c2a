"""`minisgl bench`: measures the engine or a server."""
