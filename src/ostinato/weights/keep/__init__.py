"""What stays and what goes: garbage collection, pins, leases, verification, copies between stores."""
