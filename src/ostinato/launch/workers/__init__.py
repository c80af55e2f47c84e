"""The main loop of each worker process."""
