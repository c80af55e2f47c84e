"""A sandbox's inputs and results: limits, file system, a program's outcome, and changed files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits of one sandbox, for all its programs together. Sizes in MiB (2**20 bytes).

    Example: ``Limits(memory_mb=512, processes=64)``
    """

    memory_mb: int = 256
    disk_mb: int = 64
    processes: int = 32
    open_files: int = 256
    output_bytes: int = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """How a sandbox starts.

    `layers` are host directories stacked read-only as the sandbox's `workdir`, the last on top; writes go to the sandbox's own
    layer. `files` are put into that layer first: path relative to `workdir` -> bytes. `hosts`: the names, as "host:port", that may be
    reached, through a proxy; if there are none, there is no network at all. `env` is added to the few variables that a program sees.
    `mounts`: further host directories, read-only: path in the sandbox, outside `workdir` -> host directory.

    Example: ``SandboxSpec(files={"calc.py": b"def add(a, b): return a - b"}, limits=Limits(memory_mb=512))``
    """

    layers: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    workdir: str = "/work"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    hosts: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    mounts: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    r"""How a program ended.

    `code` is the exit code, or minus the signal number. `killed_reason` is None, "timeout", "output" or "memory". `seconds` is the
    program's own wall time, without time spent in a queue.

    Example: ``ExecResult(code=0, stdout=b"42\n", stderr=b"", timed_out=False, killed_reason=None, seconds=0.016)``
    """

    code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    killed_reason: str | None
    seconds: float


class ChangeKind(StrEnum):
    """What happened to a path. `OTHER`: it is neither file, directory nor link, and its content is not kept."""

    WRITTEN = "written"
    DELETED = "deleted"
    LINK = "link"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One path below `workdir` that changed since the start. `data` is a file's bytes, or a link's target.

    Example: ``Change(path="calc.py", kind=ChangeKind.WRITTEN, data=b"def add(a, b): return a + b", executable=False)``
    """

    path: str
    kind: ChangeKind
    data: bytes = b""
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """The isolation between a sandbox's programs and the host. `missing` lists, in plain words, what this machine does not offer.

    `kind` is "namespaces", "gvisor" or "e2b"; `forks`: a running sandbox can be copied; `counts_memory`: the kernel enforces the memory
    limit, not a watchdog.

    Example: ``Isolation(kind="namespaces", forks=True, counts_memory=False, missing=("no memory cgroup: a watch keeps the limit",))``
    """

    kind: str
    forks: bool
    counts_memory: bool
    missing: tuple[str, ...] = ()
