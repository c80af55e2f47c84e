"""Maintenance of a weight store: garbage collection, pins and leases, verification, and copies between stores."""
