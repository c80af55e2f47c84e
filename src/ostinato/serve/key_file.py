"""The clients' keys, read again whenever their file changes, so that a key is added or revoked without a restart."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from pydantic import SecretStr

from ostinato.core.errors import BadConfig
from ostinato.serve.auth import client_keys
from ostinato.serve.config import ServeConfig

_LOG = logging.getLogger(__name__)

LOOK_S = 1.0
_Stamp = tuple[int, ...] | None

Renew = Callable[[Sequence[SecretStr]], frozenset[str]]
"""Puts keys in the place of the earlier ones; returns the tenants that cannot be served before a restart. Raises BadConfig."""


class KeyFile:
    """The keys of `serve.api_keys` and of `serve.api_keys_file`. Raises BadConfig as `client_keys`.

    Example: ``keys = Keyring(KeyFile(config).keys)``
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._read = self._seen = _stamp(config.api_keys_file)  # before the keys are read, so that no change is missed
        self.keys = client_keys(config.api_keys, config.api_keys_file)

    async def watch(self, renew: Renew, look_s: float = LOOK_S) -> NoReturn:
        """Look at the file every `look_s` seconds until cancelled. A file that cannot be used changes nothing and is told in the log."""
        while True:
            await asyncio.sleep(look_s)
            stamp = await asyncio.to_thread(_stamp, self._config.api_keys_file)
            settled, self._seen = stamp == self._seen, stamp
            if settled and stamp != self._read:  # whoever is still writing it is left a moment to finish
                self._read = stamp
                await self._renew(renew)

    async def _renew(self, renew: Renew) -> None:
        try:
            keys = await asyncio.to_thread(client_keys, self._config.api_keys, self._config.api_keys_file)
            strange = renew(keys)
        except BadConfig as error:
            _LOG.error("the keys stay as they were: %s", error)
            return
        _LOG.info("serve.api_keys_file has changed: %d keys are valid now", len(keys))
        if strange:
            _LOG.warning(
                "the keys of new tenants (%s) are refused until the gateway is restarted", ", ".join(sorted(strange))
            )


def _stamp(file: Path | None) -> _Stamp:
    """Changes whenever the file is written, replaced, or given other permissions; None if it cannot be found."""
    if file is None:
        return None
    try:
        seen = file.expanduser().stat()
    except (OSError, RuntimeError):
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino, seen.st_mode
