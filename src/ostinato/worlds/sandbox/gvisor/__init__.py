"""Sandboxes with a kernel of their own: gVisor (`runsc`) handles their system calls, so that few of them reach the host's kernel."""

from ostinato.worlds.sandbox.gvisor.backend import GVisorBoxes, RunsInBoxes

__all__ = ["GVisorBoxes", "RunsInBoxes"]
