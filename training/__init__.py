"""Trains the small model that ships in ``minisgl.demo``; see README.md for the commands."""
