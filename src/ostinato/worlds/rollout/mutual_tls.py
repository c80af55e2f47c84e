"""Mutual TLS: both sides present a certificate and verify the other's. The server also refuses revoked certificates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import ssl
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from ostinato.core.errors import BadConfig

logger = logging.getLogger(__name__)
_SERIAL = re.compile(r"[0-9A-Fa-f:]{1,128}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def door_context(certificate: str, key: str, authority: str) -> ssl.SSLContext:
    """Return the TLS context of the door, the server side. Raises BadConfig, naming the faulty file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _configured(context, certificate, key, authority, "worlds.door")


def worker_context(certificate: str, key: str, authority: str) -> ssl.SSLContext:
    """Return the TLS context of a worker, the client side. Raises BadConfig, naming the faulty file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies the host name
    return _configured(context, certificate, key, authority, "worlds.connect")


@contextlib.asynccontextmanager
async def renewing(context: ssl.SSLContext, certificate: str, key: str, look_s: float = 10.0) -> AsyncGenerator[None]:
    """Reload the certificate and key into `context` whenever their files change, until the block exits. New handshakes use the new pair.

    The files are checked every `look_s` seconds. A pair that cannot be used is logged and tried again; until then the old one stays.
    """
    files = (Path(certificate).expanduser(), Path(key).expanduser())
    watching = asyncio.create_task(_renew(context, *files, [_stamp(file) for file in files], look_s))
    try:
        yield
    finally:
        watching.cancel()


async def _renew(
    context: ssl.SSLContext, certificate: Path, key: Path, loaded: list[tuple[int, ...] | None], look_s: float
) -> NoReturn:
    logged = None
    while True:
        await asyncio.sleep(look_s)
        if (stamps := [_stamp(certificate), _stamp(key)]) == loaded:
            continue
        try:
            # first into a scratch context: a key that does not match would leave `context` without a key
            for each in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), context):
                each.load_cert_chain(certificate, key)
            loaded = stamps
            logger.info("the certificate in %s has changed and is used from now on", certificate)
        except OSError as error:  # SSLError is one
            if (stamps, str(error)) != logged:
                logger.error(
                    "the old certificate stays in use, since %s and %s cannot be loaded: %s", certificate, key, error
                )
            logged = stamps, str(error)


def common_name(certificate: Mapping[str, Any] | None) -> str | None:
    """Return the common name of a verified certificate (as `SSLSocket.getpeercert` gives it), or None unless it has exactly one valid
    name.
    """
    subject = (certificate or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 and _NAME.fullmatch(names[0]) else None


def serial_of(certificate: Mapping[str, Any] | None) -> str:
    """Return the serial number of a verified certificate in hexadecimal, or "" if there is no certificate."""
    return str((certificate or {}).get("serialNumber", ""))


class RefusedSerials:
    """The revocation list `worlds.door.refused`: serial numbers from a file, read again when the file changes, without a restart.

    Raises BadConfig, naming the line that is no serial number, or the file that cannot be read.
    """

    def __init__(self, file: str = "") -> None:
        self._file = Path(file).expanduser() if file else None
        self._stamp = _stamp(self._file)
        self._serials = self._read()

    def __contains__(self, serial: str) -> bool:
        return _normalized(serial) in self._serials

    async def watch(self, look_s: float = 1.0) -> NoReturn:
        """Check the file every `look_s` seconds until cancelled. A file that cannot be used is logged and read again; until then the old
        list stays.
        """
        logged = ""
        while True:
            await asyncio.sleep(look_s)
            stamp = await asyncio.to_thread(_stamp, self._file)
            if stamp != self._stamp:
                try:
                    self._serials = await asyncio.to_thread(self._read)
                    self._stamp, logged = stamp, ""
                    logger.info("worlds.door.refused has changed: %d certificates are refused", len(self._serials))
                except BadConfig as error:
                    if str(error) != logged:
                        logger.error("the list of refused certificates stays as it was: %s", error)
                    logged = str(error)

    def _read(self) -> frozenset[str]:
        if self._file is None:
            return frozenset()
        try:
            lines = self._file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadConfig(
                f"worlds.door.refused: {self._file} cannot be read: {error}; name a text file, or leave the key out to refuse nobody"
            ) from error
        serials = [line.partition("#")[0].strip().removeprefix("serial=") for line in lines]
        for number, serial in enumerate(serials, 1):
            if serial and not _SERIAL.fullmatch(serial):
                raise BadConfig(
                    f"worlds.door.refused: line {number} of {self._file} is no serial number in hexadecimal"
                )
        return frozenset(_normalized(serial) for serial in serials if serial)


def _stamp(file: Path | None) -> tuple[int, ...] | None:
    """Return a value that changes when the file does: mtime, size and inode. None if there is no file."""
    if file is None:
        return None
    try:
        stat = file.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def _normalized(serial: str) -> str:
    return serial.replace(":", "").lstrip("0").upper()


def _configured(context: ssl.SSLContext, certificate: str, key: str, authority: str, where: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for name, path in (("certificate", certificate), ("key", key), ("authority", authority)):
        if not path or not Path(path).expanduser().is_file():
            raise BadConfig(f"{where}.{name}: {path!r} is no file; name one in PEM form")
    certificate, key, authority = (str(Path(path).expanduser()) for path in (certificate, key, authority))
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:  # SSLError is one
        raise BadConfig(f"{where}.certificate and {where}.key do not go together or cannot be read: {error}") from error
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise BadConfig(
            f"{where}.authority: {authority} holds no certificates: {error}; name the authority's certificate in PEM form"
        ) from error
    return context
