"""Records <-> what lies on the disk: JSON for what is small, bytes for tokens, and what an earlier turn already holds left out."""
