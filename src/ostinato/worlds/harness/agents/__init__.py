"""Unmodified third-party agents: a process in the sandbox, whose model calls a relay outside passes to the gateway."""
