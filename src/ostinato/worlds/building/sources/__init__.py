"""Fetches and unpacks a package's source distribution, and strips what would give an answer away. None of its code is run here."""
