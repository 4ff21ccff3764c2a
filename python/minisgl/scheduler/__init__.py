"""Decides which request runs when; see scheduler.py for the cycle."""
