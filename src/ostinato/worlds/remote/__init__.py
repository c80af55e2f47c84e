"""Rollouts on somebody else's machines: their files stay there; what comes here over mutual TLS are model calls and verdicts."""
