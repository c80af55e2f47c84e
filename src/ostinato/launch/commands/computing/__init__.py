"""The plan of a cycle on paper, and the ledger of what a run's operations were spent on."""
