"""A relay: a store near many followers that fetches each object from upstream once."""
