"""The files of the log: one SQLite database per segment, their directory, and filters over the identities in closed segments."""
