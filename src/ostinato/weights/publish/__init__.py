"""Publishing: weights -> a new version in the store."""
