"""Renderers for the process that reads long requests, each made of a directory: bytes as tokens, and what such a process may meet."""

from pathlib import Path

from ostinato.testing.renderer import ByteRenderer


class Bytes(ByteRenderer):
    def __init__(self, path: Path) -> None:
        super().__init__(context=1 << 20)


class Worst(Bytes):
    """Does what a text asks for: hangs once it has said so, computes for ever, or grows."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._path, self._held = path, []

    def encode(self, text: str) -> list[int]:
        if text.startswith("hang"):
            with (self._path / "begun").open("w"):  # a pipe: opened once somebody reads there
                pass
            (self._path / "never").open()  # a pipe that nobody writes to
        while text.startswith("spin"):
            pass
        if text.startswith("grow"):
            self._held.append(b"x" * (256 << 20))
        return super().encode(text)
