"""Every option of the engine, the scheduler and the server, and where its value comes from."""
