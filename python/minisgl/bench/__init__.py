"""`minisgl bench`."""
