"""Rollouts for other programs to read."""
