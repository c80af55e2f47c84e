"""Implementations of the terminal commands."""
