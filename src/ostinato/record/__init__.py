"""Schema, append-only log, feedback."""
