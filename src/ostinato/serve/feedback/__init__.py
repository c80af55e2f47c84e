"""What people did: from JSON events to signals in the log."""
