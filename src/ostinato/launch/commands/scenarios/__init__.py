"""The scenarios of `ostinato demo`, one module each."""
