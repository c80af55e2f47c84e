"""The deadline of a wait in a test."""

PATIENT_S = 45.0
"""Seconds that a test waits for what must happen soon, on a busy machine, too. Less than a minute, for which a fake hangs that must not be
waited for.
"""
WHOLE_PROGRAM_S = 300.0
"""The same where processes start, import torch and compile: minutes on a machine that others keep busy."""
LEARNING_S = 900.0
"""The same where a run learns from many simulated users until something comes of it."""
