"""Where workers run: as subprocesses of this machine, or on the nodes of a cluster."""
