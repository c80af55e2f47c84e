"""Stores of objects and refs: a directory, a bucket, or a read-only store."""
