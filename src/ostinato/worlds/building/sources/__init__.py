"""A package's source distribution: fetched, unpacked, and stripped of what would give an answer away. Nothing of it is run here."""
