"""Feedback: from JSON events, telemetry and next messages to signals in the log."""
