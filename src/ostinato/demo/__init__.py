"""The scenarios of `ostinato demo`: their tasks and their simulated users."""
