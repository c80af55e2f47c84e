"""Grades a rollout's outcome where the model cannot reach."""
