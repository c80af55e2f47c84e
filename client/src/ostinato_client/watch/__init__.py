"""What becomes of the lines that an agent wrote, as signals: `python -m ostinato_client.watch` beside a git repository."""
