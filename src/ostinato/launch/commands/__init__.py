"""The implementation of each terminal command."""
