"""Where objects and refs lie: a directory, a bucket, or a store that can only be read."""
