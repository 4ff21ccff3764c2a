"""Child processes, ZeroMQ queues, run directories and logs."""
