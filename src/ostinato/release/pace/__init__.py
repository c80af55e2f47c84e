"""How fast releases may follow each other: pauses after rollbacks, the pace that traffic supports, the recent risk. Pure."""
