"""Records <-> their form on disk: JSON for small records, delta-encoded bytes for tokens, zstd with trained dictionaries."""
