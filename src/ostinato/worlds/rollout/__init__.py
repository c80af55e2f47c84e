"""Rollouts in groups: draws tasks, runs and grades them, and reports each verdict exactly once, whichever process is killed."""
