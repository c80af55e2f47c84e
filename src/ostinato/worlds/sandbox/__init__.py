"""Where code that a model wrote runs: one box of namespaces each, with a filter on system calls, and nothing of the host in reach."""

from ostinato.worlds.sandbox.backend import Boxes
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.host import python_inside
from ostinato.worlds.sandbox.runs import SingleRuns

__all__ = ["Boxes", "SandboxConfig", "SingleRuns", "python_inside"]
