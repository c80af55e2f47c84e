"""Sets unmodified coding agents up to use a gateway: `ostinato-connect AGENT` writes an agent's settings file, and can undo it."""
