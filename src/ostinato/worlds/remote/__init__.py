"""Rollouts on another party's machines: files stay there, and only model calls and verdicts come here, over mutual TLS."""
