"""Renderers for the process that reads long requests, each made of a directory: bytes as tokens, and what such a process may meet."""

import os
import signal
from pathlib import Path

from ostinato.testing.renderer import ByteRenderer


class Bytes(ByteRenderer):
    def __init__(self, path: Path) -> None:
        super().__init__(context=1 << 20)


class Worst(Bytes):
    """Does what a text asks for: is killed, hangs, computes for ever, or grows. A pipe `go` holds up its start until it is opened."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._held = []
        (path / "nice").write_text(str(os.nice(0)))
        if (path / "go").exists():
            (path / "go").open().close()

    def encode(self, text: str) -> list[int]:
        match text.partition(" ")[0]:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang":
                signal.pause()
            case "spin":
                while True:
                    pass
            case "hoard":
                self._held.append(bytearray(1 << 30))
            case "grow":
                self._held.append(b"x" * (256 << 20))
        return super().encode(text)
