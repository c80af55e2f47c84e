"""Release ledger and controller."""
