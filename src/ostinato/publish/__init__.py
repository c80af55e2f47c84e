"""Delta codec, snapshots, content-addressed store, publisher, follower."""
