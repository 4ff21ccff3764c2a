"""From settings to a running server and back."""
