"""Builds tasks from published packages: a package's own tests show what a change broke, and when it is fixed."""
