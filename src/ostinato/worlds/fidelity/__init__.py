"""Fidelity of simulated worlds: can a model tell them from production? Classifier two-sample tests on observed features."""
