"""Feedback: turns JSON events, telemetry and users' next messages into signals in the log."""
