"""The feedback client: what a product calls when somebody accepted, rejected or undid an answer.

Needs nothing but the standard library (`Ostinato`) or aiohttp (`AsyncOstinato`). Each event gets an id before the first attempt, so
that a retry can never count twice.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Iterator
from http import HTTPStatus
from types import TracebackType
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import aiohttp

from ostinato.core.errors import BadConfig, BadRequest, NotFound, OstinatoError, Unauthorized, Unavailable
from ostinato.core.records import Source

_RETRIED = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


class _Base:
    def __init__(self, base_url: str, api_key: str | None, deadline_s: float) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise BadConfig(f"base_url is {base_url!r}; give something like 'http://127.0.0.1:8000/v1'.")
        self._url = base_url.rstrip("/").removesuffix("/v1") + "/v1/feedback"
        self._deadline_s = deadline_s
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"


class Ostinato(_Base):
    """Sends feedback; blocks until it is durable.

    Args:
        base_url: the server, with or without "/v1".
        api_key: as given to the OpenAI client.
        deadline_s: longest time for one event, retries included.

    Example::

        Ostinato("http://127.0.0.1:8000").feedback(completion.id, "accepted", True, source="human")
    """

    def __init__(self, base_url: str, api_key: str | None = None, *, deadline_s: float = 30.0) -> None:
        super().__init__(base_url, api_key, deadline_s)

    def feedback(
        self,
        target: str,
        name: str,
        value: bool | float,
        *,
        id: str | None = None,
        source: str = Source.HUMAN,
        correction: str | None = None,
        comment: str | None = None,
        occurred_at: float | str | None = None,
        retracts: str | None = None,
    ) -> str:
        """Tell what happened to an answer; returns the event's id.

        Args:
            target: a response's id (its first choice) or a turn "response:choice".
            name: what happened: accepted, rejected, undone, ...
            value: true, false, or a finite number.
            id: the event's own id; the same id is counted once. A new one if None.
            source: human, implicit, code or llm.
            correction: what would have been right.
            comment: free text.
            occurred_at: Unix seconds or ISO 8601; the moment of arrival if None.
            retracts: id of an event to forget.

        Raises:
            BadRequest: the server refuses the event; the message names the field.
            Unauthorized: the key is wrong.
            Unavailable: the server did not take it before the deadline.
        """
        event = _event(locals())
        data = json.dumps(event).encode()
        wait = _Attempts(self._deadline_s, self._url)
        for left_s in wait:
            request = Request(self._url, data=data, headers=self._headers, method="POST")
            try:
                with urlopen(request, timeout=left_s) as response:
                    response.read()
                return event["id"]
            except HTTPError as error:
                wait.failed(error.code, error.read(65_536))
                error.close()
            except (URLError, OSError) as error:
                wait.last = str(error)
            time.sleep(wait.pause_s())
        raise wait.given_up()


class AsyncOstinato(_Base):
    """The same for asyncio. Use as `async with AsyncOstinato(url) as client`, or call `close()`."""

    def __init__(self, base_url: str, api_key: str | None = None, *, deadline_s: float = 30.0) -> None:
        super().__init__(base_url, api_key, deadline_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AsyncOstinato:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def feedback(
        self,
        target: str,
        name: str,
        value: bool | float,
        *,
        id: str | None = None,
        source: str = Source.HUMAN,
        correction: str | None = None,
        comment: str | None = None,
        occurred_at: float | str | None = None,
        retracts: str | None = None,
    ) -> str:
        """Tell what happened to an answer; see `Ostinato.feedback`."""
        event = _event(locals())
        if self._session is None:
            self._session = aiohttp.ClientSession(headers=self._headers)
        wait = _Attempts(self._deadline_s, self._url)
        for left_s in wait:
            try:
                timeout = aiohttp.ClientTimeout(total=left_s)
                async with self._session.post(self._url, json=event, timeout=timeout) as response:
                    body = await response.content.read(65_536)
                    if response.status < HTTPStatus.BAD_REQUEST:
                        return event["id"]
                    wait.failed(response.status, body)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                wait.last = str(error) or type(error).__name__
            await asyncio.sleep(wait.pause_s())
        raise wait.given_up()


class _Attempts:
    """Yields the seconds left for each attempt until the deadline; pauses grow and are jittered."""

    def __init__(self, deadline_s: float, url: str) -> None:
        self.last = "no attempt was made"
        self._url = url
        self._deadline_s = deadline_s
        self._ends = time.monotonic() + deadline_s
        self._pause_s = _FIRST_PAUSE_S

    def __iter__(self) -> Iterator[float]:
        while (left_s := self._ends - time.monotonic()) > 0:
            yield left_s

    def pause_s(self) -> float:
        """Seconds to sleep now."""
        pause = self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return max(0.0, min(pause, self._ends - time.monotonic()))

    def failed(self, status: int, body: bytes) -> None:
        """Remember a refusal; raise it if another attempt cannot help."""
        message, field = _explanation(body)
        self.last = f"HTTP {status}: {message}"
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status in _RETRIED:
            return
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise Unauthorized(message)
        kind = NotFound if status == HTTPStatus.NOT_FOUND else BadRequest
        raise kind(message, field=field)

    def given_up(self) -> OstinatoError:
        """The error when time has run out."""
        return Unavailable(
            f"{self._url} did not take the event within {self._deadline_s:g} s ({self.last}); send it again with the same id."
        )


def _event(fields: dict[str, Any]) -> dict[str, Any]:
    event = {name: value for name, value in fields.items() if value is not None and name != "self"}
    return {**event, "id": fields["id"] or uuid.uuid4().hex, "source": str(fields["source"])}


def _explanation(body: bytes) -> tuple[str, str | None]:
    try:
        error = json.loads(body)["error"]
        return str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError):
        return body[:200].decode(errors="replace") or "no explanation", None
