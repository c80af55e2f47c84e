"""A store near many followers that fetches each object once."""
