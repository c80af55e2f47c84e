"""Records <-> their form on disk: JSON for small records, bytes for tokens, without the ids that an earlier turn already holds."""
