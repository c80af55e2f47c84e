"""A trainer over several ranks on a real model."""
