"""Real processes that start in milliseconds: children forked from a process with all imports done and no threads."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

from tests.examinations.weight_faults.outcome import Broken

Say = Callable[..., None]
Work = Callable[[Say, "Ears"], Coroutine[Any, Any, None]]
PATIENCE_S = 60.0


class Ears:
    """The lines that the parent sends to its child."""

    def __init__(self, fd: int) -> None:
        self._file = os.fdopen(fd, "rb", buffering=0)

    async def line(self) -> str:
        """The next line."""
        return (await asyncio.to_thread(self._file.readline)).decode().strip()


class Child:
    """A process that runs `work(say, ears)`; its messages arrive here as dictionaries.

    Example: ``with Child(work) as child: child.tell("go"); event = child.hear()``
    """

    def __init__(self, work: Work) -> None:
        out_r, out_w = os.pipe()
        in_r, in_w = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(out_r)
            os.close(in_w)
            _live(work, out_w, Ears(in_r))
        os.close(out_w)
        os.close(in_r)
        self._out, self._in, self._rest = out_r, in_w, b""
        self._status: int | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self._status is None:
                os.kill(self.pid, signal.SIGKILL)
        self.wait()
        os.close(self._out)
        os.close(self._in)

    def tell(self, line: str) -> None:
        """Send the child a line."""
        os.write(self._in, line.encode() + b"\n")

    def hear(self) -> dict[str, Any] | None:
        """The child's next message, or None when it has ended. Raises Broken after a minute of silence or a crash."""
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._out], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise Broken(f"nothing was heard for {PATIENCE_S:.0f} s")
            data = os.read(self._out, 1 << 16)
            if not data:
                return None
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        said = json.loads(line)
        if "crash" in said:
            raise Broken(said["crash"])
        return said

    def all(self) -> list[dict[str, Any]]:
        """All messages until the child ends."""
        found: list[dict[str, Any]] = []
        while (said := self.hear()) is not None:
            found.append(said)
        return found

    def wait(self) -> int:
        """The child's wait status."""
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)
        return self._status

    @property
    def killed(self) -> bool:
        """Whether the child was ended by signal 9."""
        return os.WIFSIGNALED(self.wait()) and os.WTERMSIG(self.wait()) == signal.SIGKILL


def _live(work: Work, out: int, ears: Ears) -> None:
    def say(**said: Any) -> None:
        os.write(out, json.dumps(said).encode() + b"\n")

    try:
        asyncio.run(work(say, ears))
    except BaseException:  # noqa: BLE001 (the parent reports any error)
        say(crash=traceback.format_exc(limit=-6))
        os._exit(1)
    os._exit(0)
