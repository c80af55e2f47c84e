"""The `gvisor` backend: sandboxes with a user-space kernel (gVisor, `runsc`), so that few of their system calls reach the host's kernel."""

from ostinato.worlds.sandbox.gvisor.backend import GVisorBoxes, RunsInBoxes

__all__ = ["GVisorBoxes", "RunsInBoxes"]
