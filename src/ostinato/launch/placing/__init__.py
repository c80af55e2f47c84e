"""Where workers run: subprocesses of this machine."""
