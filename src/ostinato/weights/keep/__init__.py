"""Garbage collection, pins, leases, verification, and copies between stores."""
