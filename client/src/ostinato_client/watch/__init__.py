"""Signals on how many lines that an agent wrote are kept: `python -m ostinato_client.watch` beside a git repository."""
