"""Reward functions, credit, and the ledger that accounts for every turn."""
