"""Model calls: from a typed request to turns in the log and an answer on the wire."""
