"""Agents that are not ours, unmodified: a process in the sandbox, whose model calls a relay outside takes to the gateway."""
