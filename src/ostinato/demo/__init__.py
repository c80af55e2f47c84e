"""What `ostinato demo` shows: the tasks of its scenarios, and their simulated users."""
