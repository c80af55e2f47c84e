"""Grammars that answers are held to: compiled by llguidance, after a process that may fail has compiled them first."""
