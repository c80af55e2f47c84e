"""The files of the log: one SQLite database per segment, their directory, and the identities that the closed ones hold."""
