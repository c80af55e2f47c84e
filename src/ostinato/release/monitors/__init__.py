"""Monitors of what training does to people and to behaviour: rates, drift detectors, reward hacking, and whom the model learns from."""
