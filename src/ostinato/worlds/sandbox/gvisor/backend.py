"""The gVisor backend: one runsc container per sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

from ostinato.core.errors import BadConfig, BadRequest, SandboxRefused, Unavailable
from ostinato.core.sandboxing import Isolation, SandboxSpec
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.gvisor.box import PANIC, GVisorBox
from ostinato.worlds.sandbox.gvisor.bundle import configuration, layers_owner, whom_programs_are
from ostinato.worlds.sandbox.gvisor.ground import Ground
from ostinato.worlds.sandbox.gvisor.line import GvisorConnection
from ostinato.worlds.sandbox.gvisor.ports import Ports
from ostinato.worlds.sandbox.launcher import system_call_filter
from ostinato.worlds.sandbox.proxy import Proxy, check_hosts
from ostinato.worlds.sandbox.slots import SandboxPlaces
from ostinato.worlds.sandbox.spec_validation import (
    ENVIRONMENT,
    check_environment,
    check_mounts,
    check_names,
    check_workdir,
    pack_files,
)

_START_S = 30.0
# how gVisor intercepts system calls, the faster first; releases before 2023 have only the second
_PLATFORMS = (
    "systrap",
    "ptrace",
)
_INSTALL = (
    'sandbox.backend = "gvisor" needs runsc, which is not on the PATH. To get it: apt-get install runsc (Debian, Ubuntu), or a release '
    'from https://gvisor.dev/docs/user_guide/install; or set sandbox.backend = "namespaces"'
)
_MISSING = (
    "a living sandbox cannot be copied",
    "no memory cgroup: a watch in the sandbox keeps the limit",
)


class GVisorBoxes:
    r"""A `Backend` whose sandboxes have gVisor as their kernel, on this machine. Raises BadConfig where runsc is not installed.

    Example::

        boxes = GVisorBoxes(SandboxConfig())
        box = await boxes.start(SandboxSpec(files={"a.txt": b"1"}))
        await box.exec(["sh", "-c", "wc -c a.txt"], timeout=5.0)   # stdout == b"1 a.txt\n"
    """

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        runsc = shutil.which("runsc")
        if runsc is None:
            raise BadConfig(_INSTALL)
        self._runsc = runsc
        self._lock = asyncio.Lock()
        self._places = SandboxPlaces[GVisorBox](self.config.boxes)
        self._ground: Ground | None = None
        self.platform = ""
        self._mended = False

    async def isolation(self) -> Isolation:
        await self._opened()
        missing = _MISSING
        if self._mended:
            missing += (
                "this runsc is from before 2023: a preloaded library makes up for a flag of statx that it refuses",
            )
        if os.getuid() != 0:
            missing += ("not started by root: programs see themselves as root, without root's rights",)
        return Isolation(kind="gvisor", forks=False, counts_memory=False, missing=missing)

    async def _opened(self) -> Ground:
        """The ground, once a first sandbox has shown that sandboxes work here. Raises SandboxRefused."""
        async with self._lock:
            if self._ground is None:
                ground = await asyncio.to_thread(Ground)
                try:
                    await self._try(ground)
                except BaseException:
                    await asyncio.to_thread(ground.close)
                    raise
                self._ground = ground
            return self._ground

    async def _try(self, ground: Ground) -> None:
        refused: list[str] = []
        for self.platform in _PLATFORMS:
            try:
                box, said = await self._launch(SandboxSpec(), ground)
            except Unavailable as error:
                refused.append(f"{self.platform}: {error}")
                continue
            await box.stop()
            self._mended = not said["statx"]
            if self._mended:
                await asyncio.to_thread(ground.mend_statx)
            return
        raise SandboxRefused(f"generated code cannot be isolated here: runsc starts no sandbox ({'; '.join(refused)})")

    async def start(self, spec: SandboxSpec, *, alone: bool = False) -> GVisorBox:
        """As `Backend.start`. With `alone`, /proc is empty, so that no process of a program can inspect another."""
        check_names(spec.files)
        check_workdir(spec.workdir)
        check_mounts(spec.mounts, spec.workdir)
        check_environment(spec.env)
        check_hosts(spec.hosts)
        owner = layers_owner(spec.layers)
        for source in spec.mounts.values():
            if not os.path.isdir(source):
                raise BadRequest(f"mounts: {source!r} is no directory", field="mounts")
            seen = os.stat(source)
            if os.getuid() == 0 and seen.st_uid != owner and seen.st_mode & 0o005 != 0o005:
                raise BadRequest(
                    f"mounts: {source!r} may not be entered by everybody, so not by programs either; chmod -R o+rX",
                    field="mounts",
                )
        ground = await self._opened()
        return await self._places.start(lambda: self._placed(spec, ground, alone=alone), spec.hosts)

    async def _placed(self, spec: SandboxSpec, ground: Ground, *, alone: bool) -> GVisorBox:
        return (await self._launch(spec, ground, alone=alone))[0]

    def _command(self, ground: Ground, place: Path) -> list[str]:
        options = [f"--root={ground.state}", "--network=none", f"--platform={self.platform}", "--ignore-cgroups"]
        options += ["--overlay2=root:memory"]  # mount points are made in memory
        options += [f"--panic-log={place / PANIC}"]
        options += ["--file-access-mounts=exclusive", *(["--rootless"] if os.getuid() else [])]
        return [
            self._runsc,
            *options,
            "run",
            f"--bundle={place}",
            f"--pid-file={place / 'pid'}",
            f"{ground.place.name}-{place.name}",
        ]

    async def _launch(
        self, spec: SandboxSpec, ground: Ground, *, alone: bool = False
    ) -> tuple[GVisorBox, dict[str, Any]]:
        """One container, and its pid 1's report of it. Raises BadRequest for files that do not fit, Unavailable, SandboxRefused."""
        owner = layers_owner(spec.layers) if os.getuid() == 0 else None
        line = GvisorConnection()
        with contextlib.ExitStack() as leaving:
            leaving.callback(line.close)
            place = leaving.enter_context(ground.box())
            ports = Ports(place / "ports")
            leaving.callback(ports.close)
            covers = await asyncio.to_thread(lambda: list(ground.covers(spec.mounts))) if owner == 0 else []
            (place / "config.json").write_text(json.dumps(configuration(spec, ground, owner, covers)))
            errors = os.open(place / "errors", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            leaving.callback(os.close, errors)
            process = await asyncio.create_subprocess_exec(
                *self._command(ground, place), stdin=line.theirs.fileno(), stdout=ports.theirs.fileno(), stderr=errors,
                env={"PATH": os.environ.get("PATH", os.defpath)}, cwd="/", start_new_session=True,
            )  # fmt: skip
            ports.sent()
            await line.sent()
            env = ENVIRONMENT | (Proxy.VARIABLES if spec.hosts else {}) | dict(spec.env)
            box = GVisorBox(spec, line, ports, process, place, env)
            try:
                said = await self._said(spec, line, owner, alone=alone)
            except Unavailable as error:
                await box.stop()
                told = os.pread(errors, 1500, max(0, os.fstat(errors).st_size - 1500)).decode(errors="replace").strip()
                raise Unavailable(f"{error}: {told or 'runsc said nothing'}") from error
            except BaseException:
                await box.stop()
                raise
            box.on_stop.append(leaving.pop_all().close)
        return box, said

    async def _said(
        self, spec: SandboxSpec, line: GvisorConnection, owner: int | None, *, alone: bool
    ) -> dict[str, Any]:
        limits = spec.limits
        told = {
            "workdir": spec.workdir,
            "layers": len(spec.layers),
            "owner": whom_programs_are(owner),
            "memory": limits.memory_mb << 20,
            "disk": limits.disk_mb << 20,
            "processes": limits.processes,
            "open_files": limits.open_files,
            "alone": alone,
            "filter": (await asyncio.to_thread(system_call_filter)).hex(),
        }
        files = await asyncio.to_thread(pack_files, spec.files)
        said, _ = await line.answer(told, files, within=_START_S)
        if said["error"] and said.get("step") == "write the files":
            raise BadRequest(f"files: they do not fit into the sandbox ({said.get('told')})", field="files")
        if said["error"]:
            raise Unavailable(f"the sandbox could not be built: step {said.get('step')!r}: {said.get('told')}")
        return said

    async def close(self) -> None:
        await self._places.close()
        async with self._lock:
            if self._ground is not None:
                await asyncio.to_thread(self._ground.close)
                self._ground = None
