"""Weights -> a new version in the store."""
