"""Watches what the model does to people: behaviour rates, their detectors, and who it learns from."""
