"""Converts a sandbox's spec into the OCI configuration that runsc starts it with."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ostinato.core.errors import BadRequest
from ostinato.core.sandboxing import SandboxSpec
from ostinato.worlds.sandbox.gvisor.ground import NOBODY, Ground
from ostinato.worlds.sandbox.host import python_inside
from ostinato.worlds.sandbox.spec_validation import ENVIRONMENT

INSIDE, INIT = 1000, 1  # the users that programs and pid 1 run as, in the sandbox's own kernel
STRANGER = NOBODY - 1  # a host user who owns nothing
_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN", "SYS_RESOURCE")

_RUN = "import sys; sys.path.insert(0, '/.box/code'); import serve; serve.main()"


def layers_owner(layers: Sequence[str]) -> int:
    """The host user who owns the layers and whom programs are mapped to; STRANGER without layers. Raises BadRequest."""
    for layer in layers:
        if not os.path.isabs(layer):
            raise BadRequest("layers: must be absolute paths of directories", field="layers")
        if not os.path.isdir(layer):
            raise BadRequest(f"layers: {layer!r} is no directory", field="layers")
    owners = {os.stat(layer).st_uid for layer in layers}
    if len(owners) > 1:
        raise BadRequest(
            f"layers: they belong to several users ({', '.join(map(str, sorted(owners)))}), and gVisor can show one of them as the "
            "programs' own; give them one owner",
            field="layers",
        )
    return owners.pop() if owners else STRANGER


def mappings(owner: int) -> list[dict[str, int]]:
    """Users of the sandbox -> users of the host, for a sandbox started by root. The sandbox's root is nobody outside, and programs are
    `owner`. The host's root is mapped as well, so that places only root may enter on the host (an interpreter in its home) can be shown.
    """
    nobody = NOBODY if owner != NOBODY else NOBODY - 1
    pairs = {0: nobody, INSIDE: owner} | ({} if owner == 0 else {INSIDE + 1: 0})
    return [{"containerID": inside, "hostID": outside, "size": 1} for inside, outside in pairs.items()]


def _bind(source: str | Path, place: str) -> dict[str, Any]:
    return {"destination": place, "type": "bind", "source": str(source), "options": ["ro"]}


def _tmpfs(place: str, *options: str) -> dict[str, Any]:
    return {"destination": place, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", *options]}


def configuration(
    spec: SandboxSpec, ground: Ground, owner: int | None, covers: Iterable[tuple[str, str]] = ()
) -> dict[str, Any]:
    """The contents of config.json. `owner` is None if root does not start the sandbox, in which case no other user can be mapped into it.
    `covers` lists paths to mount over what is shown, each with its place in the sandbox.
    """
    mounts: list[dict[str, Any]] = [{"destination": "/proc", "type": "proc", "source": "proc"}]
    mounts += [_bind(source, seen) for source, seen in ground.shown()]
    mounts += [_bind(source, seen) for seen, source in spec.mounts.items()]
    mounts += [_bind(source, seen) for source, seen in covers]
    mounts += [_tmpfs("/.box", "size=4m", "mode=700", f"uid={INIT}", f"gid={INIT}")]
    mounts += [_bind(ground.place / "code", "/.box/code")]
    mounts += [_bind(layer, f"/.box/layers/{number}") for number, layer in enumerate(spec.layers)]
    mounts += [_tmpfs(seen) for seen in ("/tmp", "/dev/shm", spec.workdir)]  # pid 1 mounts its own over them
    rights = [f"CAP_{name}" for name in _CAPABILITIES]
    namespaces = [{"type": name} for name in ("pid", "mount", "ipc", "uts", "network")]
    mapped = mappings(owner) if owner is not None else []
    return {
        "ociVersion": "1.0.0",
        "process": {
            "user": {"uid": INIT, "gid": INIT},
            "args": [python_inside(), "-s", "-S", "-P", "-B", "-c", _RUN],
            "env": [f"{name}={value}" for name, value in ENVIRONMENT.items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), rights),
            "rlimits": [{"type": "RLIMIT_NOFILE", "hard": 4096, "soft": 4096}],
        },
        "root": {"path": str(ground.root), "readonly": True},
        "hostname": "workspace",
        "mounts": mounts,
        "linux": {
            "namespaces": [*namespaces, {"type": "user"}] if mapped else namespaces,
            **({"uidMappings": mapped, "gidMappings": mapped} if mapped else {}),
        },
    }


def whom_programs_are(owner: int | None) -> int:
    """The programs' user inside the sandbox. If root did not start it, only the sandbox's root is the owner of our files."""
    return 0 if owner is None else INSIDE
