"""The host's handle on the zygote: starts it, requests boxes and layers, and replaces it if it died."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ostinato.core.errors import SandboxRefused, Unavailable
from ostinato.worlds.sandbox.inside.groups import sweep_groups
from ostinato.worlds.sandbox.launcher import build, system_call_filter
from ostinato.worlds.sandbox.protocol import START, StartFlag, anonymous_file, readable, refusal, send
from ostinato.worlds.sandbox.spec_validation import check_directory

_ZYGOTE = Path(__file__).parent / "inside" / "zygote.py"
_START_S = 20.0
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


def python_inside() -> str:
    """Return the interpreter's path inside a sandbox, for an argv. It is the base installation's: virtual environments are not visible."""
    return f"{sys.base_prefix}/bin/python{VERSION}"


class Zygote:
    """The keeper process and the zygote that it supervises (see inside/zygote.py).

    `full` boxes have /proc, /etc and the like; others have only a Python runtime and /tmp. With `gives_way`, boxes yield the processor to
    everything else on the machine.
    """

    def __init__(self, *, full: bool, groups: bool = True, gives_way: bool = True) -> None:
        self._full, self._groups, self._gives_way = full, groups, gives_way
        self._lock = asyncio.Lock()
        self._layer_lock = asyncio.Lock()
        self._layers: dict[str, int] = {}
        self._opening: asyncio.Task[None] | None = None
        self._control: socket.socket | None = None
        self._requests: socket.socket | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.hello: dict[str, Any] = {}

    def _settings(self) -> bytes:
        settings = {
            "library": str(build()),
            "prefix": sys.base_prefix,
            "version": VERSION,
            "full": self._full,
            "groups": self._groups,
            "gives_way": self._gives_way,
            "filter": system_call_filter().hex(),
        }
        return json.dumps(settings).encode()

    async def ensure_started(self) -> socket.socket:
        """Start the zygote unless it is running, and return its control socket.

        Raises SandboxRefused with the step that failed, Unavailable if it was killed or did not start in time.
        """
        async with self._lock:
            if self._control is not None:
                return self._control
            settings = anonymous_file(await asyncio.to_thread(self._settings))
            pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
            passed = [pair[1].fileno() for pair in pairs] + [settings]
            argv = [sys.executable, "-s", "-S", "-P", str(_ZYGOTE), *map(str, passed)]
            try:
                self.process = subprocess.Popen(  # noqa: ASYNC220 - milliseconds, once
                    argv, pass_fds=passed, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL, env={"PYTHONHASHSEED": "0"}, cwd="/",
                )  # fmt: skip
            except PermissionError as error:  # for example, only root may enter the interpreter's directory
                for ours, _ in pairs:
                    ours.close()
                raise SandboxRefused(
                    f"generated code cannot be isolated here: the interpreter {sys.executable} cannot be started anew ({error.strerror}); "
                    "install it where this user may run it"
                ) from error
            finally:
                os.close(settings)
                for _, other in pairs:
                    other.close()
            for ours, _ in pairs:
                ours.setblocking(False)
            self._control, self._requests = pairs[0][0], pairs[1][0]
            try:
                async with asyncio.timeout(_START_S):
                    hello = await asyncio.get_running_loop().sock_recv(self._control, 65536)
                if not hello and await asyncio.to_thread(self.process.wait, _START_S) <= 0:
                    raise Unavailable("the sandbox's keeper was killed as it started; is memory short?")
                self.hello = json.loads(hello or b'{"step": "start the zygote", "error": "it ended at once"}')
                if "step" in self.hello:
                    raise refusal(self.hello["step"], self.hello["error"])
            except TimeoutError as error:
                self.close()
                why = f"the sandbox's keeper did not start in time ({_START_S:g} s); is the machine busy?"
                raise Unavailable(why) from error
            except BaseException:
                self.close()
                raise
            return self._control

    async def start(self, message: bytes, fds: Sequence[int], layers: Mapping[str, int] | None = None) -> None:
        """Start a box, which answers over its own socket in `fds`.

        A killed zygote is replaced once, unless the message refers to `layers` (host path -> number) that the new zygote has not opened.
        Raises Unavailable.
        """
        for _ in range(2):
            control = await self.ensure_started()
            if any(self._layers.get(path) != number for path, number in (layers or {}).items()):
                raise Unavailable("the sandbox's zygote was replaced, and knows no layers yet")
            try:
                await send(control, message, fds)
                return
            except OSError:
                if self._control is control:
                    self.close()
        raise Unavailable("the sandbox's zygote died during two attempts; is something killing it (out of memory)?")

    async def layer(self, field: str, path: str) -> int:
        """Return the zygote's number for a directory of the host, which is opened at first use. `field` is its field in the spec.

        Raises BadRequest if it is not a directory any more, SandboxRefused, Unavailable.
        """
        check_directory(field, path)  # the spec may have been checked long before the start got its turn
        path = os.path.realpath(path)
        async with self._layer_lock:
            if self._opening is not None:  # a cancelled caller's request: its answers are not ours
                await asyncio.wait({self._opening})
            control = await self.ensure_started()
            if path not in self._layers:
                self._opening = opening = asyncio.create_task(self._open_layer(control, path))
                # retrieve the exception, since the caller may be gone
                opening.add_done_callback(lambda done: done.cancelled() or done.exception())
                await asyncio.wait({opening})
                if opening.cancelled():
                    raise Unavailable("the sandbox's zygote was ended as it opened a layer")
                try:
                    opening.result()
                except SandboxRefused:
                    raise
                except OSError as error:
                    if self._control is control:
                        self.close()
                    raise Unavailable(
                        "the sandbox's keeper was killed as it opened a layer; is memory short?"
                    ) from error
            return self._layers[path]

    async def _open_layer(self, control: socket.socket, path: str) -> None:
        """Have the keeper open a layer and the zygote attach it; remember its number.

        Once begun it must read both answers, or the next caller would take them for its own. Raises SandboxRefused, and OSError if the
        keeper or the zygote is gone.
        """
        assert self._requests is not None
        loop = asyncio.get_running_loop()
        await send(self._requests, path.encode(), ())
        await readable(self._requests)
        answer, fds, _, _ = socket.recv_fds(self._requests, 65536, 1)
        if not answer:
            raise ConnectionResetError
        if not fds:
            report = json.loads(answer)
            raise refusal(report["step"], f"{report['error']} ({path})")
        try:
            await send(control, START.pack(StartFlag.LAYER, *[0] * 12), fds)
        finally:
            os.close(fds[0])
        number = await loop.sock_recv(control, 64)
        if not number:
            raise ConnectionResetError
        self._layers[path] = int(number)

    def close(self) -> None:
        """End the zygote and every box, and wait until the keeper has cleaned up. A later box starts a new zygote."""
        if self._opening is not None:
            self._opening.cancel()
        for end in (self._control, self._requests):
            if end is not None:
                end.close()
        self._control = self._requests = None
        self._layers.clear()
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10.0)
            self.process.kill()
            if self.process.wait() < 0:
                sweep_groups(tries=100)
            self.process = None
