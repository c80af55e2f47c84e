"""Trials on users: the comparison of two arms, evidence that is valid at any time, and the decisions. Pure functions of the data."""
