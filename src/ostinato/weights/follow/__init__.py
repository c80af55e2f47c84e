"""A ref -> verified weights in memory."""
