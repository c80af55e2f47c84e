"""Sandboxes with a kernel of their own: gVisor (`runsc`) answers the system calls of each, so that the host's kernel sees few of them."""

from ostinato.worlds.sandbox.gvisor.backend import GVisorBoxes
from ostinato.worlds.sandbox.gvisor.runs import RunsInBoxes

__all__ = ["GVisorBoxes", "RunsInBoxes"]
