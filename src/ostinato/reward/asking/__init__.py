"""Asking a reward function: found by name, run where it can do no harm, its answers checked."""
