"""Sandboxes for code that a model wrote: boxes of Linux namespaces with a system call filter, and nothing of the host within reach."""

from ostinato.worlds.sandbox.backend import Boxes, SingleRuns
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.host import python_inside

__all__ = ["Boxes", "SandboxConfig", "SingleRuns", "python_inside"]
