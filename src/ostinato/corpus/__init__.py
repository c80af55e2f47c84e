"""Code corpora to read on with: what may be read, what is left out, token shards, and the order in which they are read."""
