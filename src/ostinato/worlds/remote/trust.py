"""Mutual TLS: each side presents a certificate and verifies the other's."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ostinato.core.errors import BadConfig

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def door_context(certificate: str, key: str, authority: str) -> ssl.SSLContext:
    """The TLS context of the door, the server side. Raises BadConfig naming the file that is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _filled(context, certificate, key, authority, "worlds.door")


def worker_context(certificate: str, key: str, authority: str) -> ssl.SSLContext:
    """The TLS context of a worker, the client side. Raises BadConfig naming the file that is wrong."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies the host name
    return _filled(context, certificate, key, authority, "worlds.connect")


def common_name(certificate: Mapping[str, Any] | None) -> str | None:
    """The common name of a verified certificate, as `ssl` represents it; None unless it has exactly one, and that is usable."""
    subject = (certificate or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 and _NAME.fullmatch(names[0]) else None


def _filled(context: ssl.SSLContext, certificate: str, key: str, authority: str, where: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    for name, path in (("certificate", certificate), ("key", key), ("authority", authority)):
        if not path or not Path(path).expanduser().is_file():
            raise BadConfig(f"{where}.{name}: {path!r} is no file; name one in PEM form")
    certificate, key, authority = (str(Path(path).expanduser()) for path in (certificate, key, authority))
    try:
        context.load_cert_chain(certificate, key)
    except (ssl.SSLError, OSError) as error:
        raise BadConfig(f"{where}.certificate and {where}.key do not go together or cannot be read: {error}") from error
    try:
        context.load_verify_locations(authority)
    except (ssl.SSLError, OSError) as error:
        raise BadConfig(f"{where}.authority: {authority} holds no certificates: {error}") from error
    return context
