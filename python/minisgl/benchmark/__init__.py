"""`minisgl bench`: benchmarks of the engine alone (offline) and of any OpenAI-compatible server (online)."""
