"""Suites, runner, statistics, gate."""
