"""How fast releases may follow each other: pauses after rollbacks, what the traffic can carry, what was risked. Pure."""
