"""Releases: the ledger, the controller, trials on users, the guard, metrics, monitors and the Auto router."""
