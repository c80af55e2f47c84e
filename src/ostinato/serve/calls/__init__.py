"""Model calls: from a parsed request to turns in the log and an answer on the wire."""
