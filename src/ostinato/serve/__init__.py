"""Gateway, dialects, sessions, engine, hot swap."""
