"""What is asked of a sandbox and what comes back: limits, a world's file system, how a program ended, what it changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one sandbox may take, all of its programs together. Sizes in MiB (2**20 bytes).

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

    `layers` are directories of the host that lie over each other, read-only, as the sandbox's `workdir`, the last on top; what is written
    there lies in a layer of the sandbox's own. `files` are put into that one first: path relative to `workdir` -> bytes. `hosts` are
    the names, as "host:port", that may be reached, through a proxy; none: no network at all. `env` is added to the few variables that a
    program sees. `mounts` shows further directories of the host, read-only: place in the sandbox, apart from `workdir` -> directory.

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
    program's own wall time, without waiting for a turn.

    Example: ``ExecResult(code=0, stdout=b"42\n", stderr=b"", timed_out=False, killed_reason=None, seconds=0.016)``
    """

    code: int
    stdout: bytes
    stderr: bytes
    timed_out: bool
    killed_reason: str | None
    seconds: float


class ChangeKind(StrEnum):
    """What became of a path. `OTHER`: something that is neither file, directory nor link, of which no content is kept."""

    WRITTEN = "written"
    DELETED = "deleted"
    LINK = "link"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One path below `workdir` that is not as it was at the start. `data` are a file's bytes, or where a link leads.

    Example: ``Change(path="calc.py", kind=ChangeKind.WRITTEN, data=b"def add(a, b): return a + b", executable=False)``
    """

    path: str
    kind: ChangeKind
    data: bytes = b""
    executable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What stands between a sandbox's programs and the host. `missing` names what this machine does not offer, in people's words.

    `kind` is "namespaces", "gvisor" or "e2b"; `forks`: a sandbox can be copied while it lives; `counts_memory`: the kernel keeps
    the limit, not a watch.

    Example: ``Isolation(kind="namespaces", forks=True, counts_memory=False, missing=("no memory cgroup: a watch keeps the limit",))``
    """

    kind: str
    forks: bool
    counts_memory: bool
    missing: tuple[str, ...] = ()
