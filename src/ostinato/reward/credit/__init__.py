"""Rewards -> advantages. Pure."""
