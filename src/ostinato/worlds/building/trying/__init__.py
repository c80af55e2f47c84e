"""Runs a package's tests in a sandbox, unchanged and mutated."""
