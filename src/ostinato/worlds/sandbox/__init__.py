"""Sandboxes for model-written code: Linux namespaces with a seccomp filter, and no access to the host's files, network or processes."""

from ostinato.worlds.sandbox.backend import Boxes, SingleRuns
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.host import python_inside

__all__ = ["Boxes", "SandboxConfig", "SingleRuns", "python_inside"]
