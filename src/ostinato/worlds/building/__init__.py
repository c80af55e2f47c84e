"""Builds coding tasks from published packages by mutation testing: the package's own tests fail on a mutation and verify its fix."""
