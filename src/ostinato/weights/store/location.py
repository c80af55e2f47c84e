"""Obstore's client for a bucket, and retries where the client gives up too early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from obstore import exceptions as errors
from obstore.store import from_url

from ostinato.core.errors import BadConfig
from ostinato.weights.store.config import BucketConfig

_AGAIN_S: Final = 0.1
_T = TypeVar("_T")


def connect(config: BucketConfig) -> Any:
    """Obstore's client for the bucket at `weights.url`. Raises BadConfig."""
    # naming an http:// endpoint allows it
    plain = any(value.startswith("http://") for value in config.options.values())
    options: Any = dict(config.options) or None
    try:
        return from_url(
            config.url,
            config=options,
            client_options={"timeout": f"{config.timeout_s}s", "allow_http": plain},
            retry_config={"max_retries": config.retries},
        )
    except (errors.BaseError, ValueError) as error:
        raise BadConfig(
            f"weights.url {config.url!r}: {short(error)}; give s3://bucket/path, gs://..., az://... or a directory"
        ) from error


async def again(retries: int, read: Callable[[], Awaitable[_T]]) -> _T:
    """Retry reads that obstore does not: a listing or a 404 that was cut off, a ref that moved before the rest of it was read."""
    for _ in range(retries):
        try:
            return await read()
        except errors.GenericError as error:
            if "body error" not in str(error):
                raise
        await asyncio.sleep(_AGAIN_S)
    return await read()


def short(error: BaseException) -> str:
    """An error on one line."""
    return " ".join(str(error).split())[:300]
