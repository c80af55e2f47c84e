"""The E2B backend: one virtual machine per sandbox, in E2B's cloud or on a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping
from typing import IO, Any

from ostinato.core.errors import BadConfig, BadRequest, SandboxRefused, Unavailable
from ostinato.core.sandboxing import Isolation, SandboxSpec
from ostinato.worlds.sandbox.config import SandboxConfig
from ostinato.worlds.sandbox.e2b.account import Account, Machine
from ostinato.worlds.sandbox.e2b.box import E2BBox
from ostinato.worlds.sandbox.e2b.parcel import helper, parcel, parts
from ostinato.worlds.sandbox.gvisor.line import GvisorConnection
from ostinato.worlds.sandbox.proxy import Proxy, check_hosts
from ostinato.worlds.sandbox.slots import SandboxPlaces
from ostinato.worlds.sandbox.spec_validation import (
    ENVIRONMENT,
    check_environment,
    check_mounts,
    check_names,
    check_workdir,
)

PYTHON = "python3"
"""The interpreter inside, found on the PATH: the template's, not the one that runs this."""
_START_S = 60.0
_MISSING = (
    "a living sandbox cannot be copied",
    "system calls are not filtered: the virtual machine is what stands between",
    "whoever runs the machines can read what is in them",
)
_UNCOUNTED = "no memory cgroup in the machine: a watch in it keeps the limit"


class E2BBoxes:
    r"""A `Backend` of E2B's virtual machines. Raises BadConfig without the SDK, or without a key in the variable E2B_API_KEY.

    Example::

        boxes = E2BBoxes(SandboxConfig(template="base"))
        box = await boxes.start(SandboxSpec(files={"a.txt": b"1"}))
        await box.exec(["sh", "-c", "wc -c a.txt"], timeout=5.0)   # stdout == b"1 a.txt\n"
    """

    def __init__(self, config: SandboxConfig | None = None, environment: Mapping[str, str] = os.environ) -> None:
        self.config = config or SandboxConfig()
        self._account = Account(self.config.template, environment)
        self._places = SandboxPlaces[E2BBox](self.config.boxes)
        self._counts: bool | None = None

    async def isolation(self) -> Isolation:
        if self._counts is None:
            await (await self.start(SandboxSpec())).stop()
        counts = bool(self._counts)
        return Isolation(
            kind="e2b", forks=False, counts_memory=counts, missing=_MISSING if counts else (*_MISSING, _UNCOUNTED)
        )

    async def start(self, spec: SandboxSpec, *, alone: bool = False) -> E2BBox:
        """As `Backend.start`. With `alone`, /proc is empty, so that no process of a program can inspect another."""
        check_names(spec.files)
        check_workdir(spec.workdir)
        check_mounts(spec.mounts, spec.workdir)
        check_environment(spec.env)
        check_hosts(spec.hosts)
        _check_directories(spec)
        return await self._places.start(lambda: self._launch(spec, alone), spec.hosts)

    async def _launch(self, spec: SandboxSpec, alone: bool) -> E2BBox:
        """Start a machine and build the sandbox in it.

        Raises BadRequest for files that do not fit, BadConfig for a template that cannot be used, SandboxRefused, Unavailable.
        """
        # a uid of its own, so that per-user limits count no other processes
        owner = 100_000 + secrets.randbelow(1 << 20)
        archive = await asyncio.to_thread(parcel, spec, owner)
        try:
            machine = await self._account.machine()
            line = GvisorConnection()
            env = ENVIRONMENT | (Proxy.VARIABLES if spec.hosts else {}) | dict(spec.env)
            box = E2BBox(spec, machine, line, env)
            try:
                place = f"/root/.ostinato-{secrets.token_hex(8)}"
                await _furnish(machine, place, archive)
                first = line.theirs.dup()
                try:
                    await line.sent()
                except BaseException:
                    first.close()
                    raise
                await box.wire.open(f"exec {PYTHON} -I -S -B {place}/helper.pyz {place}", first)
                self._counts = await self._built(spec, line, owner, alone)
            except BaseException:
                await asyncio.shield(box.stop())
                raise
        finally:
            if archive is not None:
                archive.close()
        return box

    async def _built(self, spec: SandboxSpec, line: GvisorConnection, owner: int, alone: bool) -> bool:
        """Have pid 1 build the sandbox. Returns True if the kernel counts memory there."""
        limits = spec.limits
        told: dict[str, Any] = {
            "workdir": spec.workdir,
            "layers": len(spec.layers),
            "mounts": list(spec.mounts),
            "owner": owner,
            "memory": limits.memory_mb << 20,
            "disk": limits.disk_mb << 20,
            "processes": limits.processes,
            "open_files": limits.open_files,
            "filter": "",
            "alone": alone,
        }
        try:
            said, _ = await line.answer(told, within=_START_S)
        except Unavailable as error:
            if any(text in str(error) for text in ("not found", "and 3.10 is needed")):
                raise BadConfig(
                    f"sandbox.template = {self.config.template!r} cannot be used: {error}; it needs python3, 3.10 or newer, on its PATH"
                ) from error
            raise
        if said["error"] and said.get("step") == "write the files":
            raise BadRequest(f"files: they do not fit into the sandbox ({said.get('told')})", field="files")
        if said["error"]:
            raise SandboxRefused(
                f"the template {self.config.template!r} cannot be a sandbox: step {said.get('step')!r}: {said.get('told')}"
            )
        return bool(said["counts"])

    async def close(self) -> None:
        await self._places.close()


def _check_directories(spec: SandboxSpec) -> None:
    for layer in spec.layers:
        if not os.path.isabs(layer) or not os.path.isdir(layer):
            raise BadRequest(f"layers: {layer!r} must be the absolute path of a directory", field="layers")
    for source in spec.mounts.values():
        if not os.path.isdir(source):
            raise BadRequest(f"mounts: {source!r} is no directory", field="mounts")


async def _furnish(machine: Machine, place: str, archive: IO[bytes] | None) -> None:
    await machine.upload(f"{place}/helper.pyz", helper())
    if archive is not None:
        number = 0
        each = parts(archive)
        while part := await asyncio.to_thread(next, each, b""):
            await machine.upload(f"{place}/part.{number}", part)
            number += 1
