"""What the command line runs beside a server: benchmarks, the terminal chat, verification, replay."""
