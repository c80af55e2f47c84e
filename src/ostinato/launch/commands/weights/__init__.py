"""The implementation of each `ostinato weights` command."""
