"""Mutations of one function that its package's tests can detect."""
