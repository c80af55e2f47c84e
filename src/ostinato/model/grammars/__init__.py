"""Grammars that constrain answers: compiled by llguidance, after a trial compilation in a process that may fail."""
