"""Starts the helper in an E2B sandbox: unpacks what the host sent, then forks pid 1 and becomes the relay."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import tarfile
import traceback
from typing import Any, NoReturn

from guest import Guest
from kernel import CLONE_NEWPID, PR_SET_PDEATHSIG, call
from packets import REFUSED
from relay import Relay


class PartFiles(io.RawIOBase):
    """The files `part.0`, `part.1`, ... of a directory as one stream. Each is removed as it is opened."""

    def __init__(self, place: str) -> None:
        self._place, self._next = place, 0
        self._file: io.FileIO | None = None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while True:
            if self._file is None:
                try:
                    self._file = io.FileIO(f"{self._place}/part.{self._next}")
                except FileNotFoundError:
                    return 0
                os.unlink(f"{self._place}/part.{self._next}")
                self._next += 1
            if count := self._file.readinto(buffer):
                return count
            self._file.close()
            self._file = None


def unpack(place: str) -> None:
    """Extract the parcel's parts into `place`. Raises OSError, TarError."""
    os.umask(0o022)
    os.chmod(place, 0o700)
    for name in ("layers", "mounts", "ports"):
        os.mkdir(f"{place}/{name}")
    if not os.path.exists(f"{place}/part.0"):
        return
    with tarfile.open(
        fileobj=io.BufferedReader(PartFiles(place), 1 << 20), mode="r|gz", encoding="utf-8", errors="surrogateescape"
    ) as tar:
        tar.extraction_filter = lambda member, path: member  # the host made the archive, so it is trusted
        tar.extractall(place, numeric_owner=True)


def _refuse(why: str) -> NoReturn:
    os.write(1, f"{REFUSED}{why}\n".encode("utf-8", "replace"))
    os._exit(3)


def main(place: str) -> NoReturn:
    """Unpack the parcel, fork pid 1 and run the relay. Never returns."""
    try:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("-900")
        unpack(place)
    except (OSError, tarfile.TarError) as error:
        _refuse(f"the layers, mounts and files cannot be unpacked: {error}")
    theirs, ours = socket.socketpair()
    try:
        call("unshare", CLONE_NEWPID)
    except OSError as error:
        _refuse(f"the helper may not make a namespace ({error.strerror}): it has to be started as root")
    if os.fork() == 0:
        try:
            call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            theirs.close()
            null = os.open("/dev/null", os.O_RDWR)
            for fd in (0, 1):
                os.dup2(null, fd)
            Guest(ours, place).run()
        except BaseException:  # noqa: BLE001 - the host reads it if the sandbox did not start
            traceback.print_exc()
        finally:
            os._exit(1)
    ours.close()
    try:
        Relay(theirs, f"{place}/ports").run()
    finally:
        os._exit(1)
