"""Adaptation to a person: a few dials (and styles), learned from the person's own ratings with the population as prior."""
