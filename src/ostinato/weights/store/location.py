"""Where weights are kept: the settings of a bucket, obstore's client for it, and what to do when that gives up too early."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from obstore import exceptions as errors
from obstore.store import from_url
from pydantic import BaseModel, Field

from ostinato.core.errors import BadConfig

_AGAIN_S: Final = 0.1
_T = TypeVar("_T")


class BucketConfig(BaseModel, frozen=True, extra="forbid"):
    """Where weights are kept, and how a bucket is talked to."""

    url: str = Field(
        default="",
        description="s3://bucket/path, gs://bucket/path, az://container/path, a relay (http://host:port, read only) or a directory; "
        "empty: inside the run's directory.",
    )
    part_bytes: int = Field(
        default=1 << 23, ge=5 << 20, le=1 << 28, description="Larger objects travel in parts of this size, in parallel."
    )
    parallel: int = Field(default=16, ge=1, le=64, description="Parts under way at once.")
    timeout_s: float = Field(default=60.0, gt=0, description="Longest wait for one request.")
    retries: int = Field(default=10, ge=0, description="Attempts after a failed request, further and further apart.")
    renew_s: float = Field(
        default=3600.0,
        ge=0,
        description="An object that is there and older than this is sent again, so that no collection takes it meanwhile.",
    )
    options: dict[str, str] = Field(
        default_factory=dict,
        description="obstore's own settings, such as aws_region or aws_endpoint; for http(s): headers to send.",
    )


def connect(config: BucketConfig) -> Any:
    """Obstore's client for the bucket at `weights.url`. Raises BadConfig."""
    plain = any(value.startswith("http://") for value in config.options.values())  # whoever names it wants it
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
    """Repeat what is not repeated below us: a listing or a 404 that was cut, a ref that moved before its rest was read."""
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
