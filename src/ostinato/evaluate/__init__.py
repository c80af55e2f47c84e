"""Offline evaluation: suites, the runner, statistics, and the gate that judges a candidate."""
