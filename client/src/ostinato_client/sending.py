"""Sends events and people's choices to the server, with retries until a deadline."""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as Late  # the built-in one only since Python 3.11
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from ostinato_client.errors import NotAllowed, NotTaken, Refused
from ostinato_client.events import Event, Receipt, receipt

MOST_EVENTS = 1000  # in one call
_LONGEST_ANSWER = 1 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_RETRIED = (408, 409, 429)
ATTEMPT = "ostinato-attempt"  # the threads' name
_MOST_LEFT = 16  # attempts that nobody waits for any more and that have not ended
_Answer = tuple[int, float, bytes]
_Read = TypeVar("_Read")


class _NoRedirects(HTTPRedirectHandler):
    """Refuses redirects, so that the key is sent only to the named server."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


class _Timed(Request):
    """A request that is sent before `ends` (`time.monotonic`) or not at all."""

    ends = 0.0


def _in_time(kind: Any, ends: float) -> Any:
    """A kind of connection that sends nothing after `ends`, however long it took to look up the name and to connect."""

    class InTime(kind):
        def connect(self) -> None:
            super().connect()
            left_s = ends - time.monotonic()
            if left_s <= 0:
                self.close()
                raise OSError("no connection in time")
            self.sock.settimeout(left_s)

    return InTime


class _Http(HTTPHandler):
    def do_open(self, http_class: Any, req: Any, **more: Any) -> Any:
        return super().do_open(_in_time(http_class, req.ends), req, **more)


class _Https(HTTPSHandler):
    def do_open(self, http_class: Any, req: Any, **more: Any) -> Any:
        return super().do_open(_in_time(http_class, req.ends), req, **more)


class Sender:
    """Sends events to one server with one key; may be used by several threads.

    A call's deadline counts from `since`, by `time.monotonic`, or from its beginning if that is None. After it nothing is sent.

    Raises ValueError for a URL that is not http or https, and for a key that no header can hold.
    """

    def __init__(self, base_url: str, api_key: str | None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"base_url is {base_url!r}; give something like 'http://127.0.0.1:8321'.")
        base = base_url.rstrip("/")
        self._base = (base[: -len("/v1")] if base.endswith("/v1") else base) + "/v1"
        self.url = f"{self._base}/feedback"
        self._opener = build_opener(_NoRedirects, _Http, _Https)
        self._left: set[threading.Thread] = set()
        self._headers = {"content-type": "application/json"}
        if api_key is not None:
            if not re.fullmatch(r"[\x20-\x7e\xa0-\xff]*", api_key):  # http.client's own error would repeat the key
                raise ValueError("The API key has characters that no header can hold, such as a line's end.")
            self._headers["authorization"] = f"Bearer {api_key}"

    def send(self, events: Sequence[Event], deadline_s: float, since: float | None = None) -> list[Receipt]:
        """Send events; returns a receipt for each, in order. Raises Refused, NotAllowed, NotTaken."""
        ends = _ends(deadline_s, since)
        receipts: list[Receipt] = []
        for start in range(0, len(events), MOST_EVENTS):
            receipts += self._send(events[start : start + MOST_EVENTS], deadline_s, ends)
        return receipts

    def _send(self, events: Sequence[Event], deadline_s: float, ends: float) -> list[Receipt]:
        one = len(events) == 1
        body = events[0].to_json() if one else [event.to_json() for event in events]
        lost = f"{len(events)} event(s) within {deadline_s:g} s", "send them again with the same ids"

        def receipts(answer: Any) -> list[Receipt]:
            found = [receipt(each) for each in ([answer] if one else answer)]
            if len(found) != len(events):
                raise ValueError("not a receipt for each event")
            return found

        return self._call("POST", "/feedback", body, {}, ends, lost, receipts)

    def choose(
        self, user: str, train: str | None, signature: str | None, deadline_s: float, since: float | None = None
    ) -> str:
        """Record what a user allows, or with `train` None ask for it; returns what is recorded. Raises Refused, NotAllowed, NotTaken."""
        headers = {} if signature is None else {"x-ostinato-user-signature": signature}
        ends, lost = _ends(deadline_s, since), (f"{user!r}'s choice within {deadline_s:g} s", "send it again")

        def recorded(answer: Any) -> str:
            return str(answer["train"])

        if train is None:
            return self._call("GET", "/consent", None, {**headers, **_naming(user)}, ends, lost, recorded)
        return self._call("PUT", "/consent", {"user": user, "train": train}, headers, ends, lost, recorded)

    def dials(
        self,
        method: str,
        user: str,
        dials: Mapping[str, float | str | None] | None,
        signature: str | None,
        deadline_s: float,
        since: float | None = None,
    ) -> dict[str, Any]:
        """Show a user's dials (GET), set some (PUT) or reset all (DELETE); returns them as they are then. Raises as `send`."""
        headers = {} if signature is None else {"x-ostinato-user-signature": signature}
        ends, lost = _ends(deadline_s, since), (f"{user!r}'s dials within {deadline_s:g} s", "send it again")
        shown: Callable[[Any], dict[str, Any]] = dict
        return self._call(method, "/adaptation", dials, {**headers, **_naming(user)}, ends, lost, shown)

    def _call(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str],
        ends: float,
        lost: tuple[str, str],
        read: Callable[[Any], _Read],
    ) -> _Read:
        """What `read` makes of the JSON answer to a request that may be repeated.

        `lost`: what was not taken in time, and what to do then.
        """
        data = None if body is None else json.dumps(body).encode()
        last = "no attempt was made"
        for pause_s in _pauses():
            if time.monotonic() >= ends:
                break
            # a new one for each attempt: urllib changes one that goes through a proxy, and would send it without TLS the next time
            request = _Timed(self._base + path, data=data, headers={**self._headers, **headers}, method=method)
            request.ends = ends
            wait_s = 0.0
            try:
                status, wait_s, answer = self._attempt(request)
                if status < 300:
                    return _read(answer, read)
                last = f"HTTP {status}: {_refused(status, answer)}"
            except (OSError, http.client.HTTPException) as error:  # URLError and TimeoutError are OSErrors
                last = str(error) or type(error).__name__
            time.sleep(max(0.0, min(max(pause_s, wait_s), ends - time.monotonic())))
        raise NotTaken(f"{self._base}{path} did not take {lost[0]} ({last}); {lost[1]}.")

    def _attempt(self, request: _Timed) -> _Answer:
        """Status, seconds to wait before another attempt, and body, before `request.ends`."""
        self._left.difference_update([thread for thread in tuple(self._left) if not thread.is_alive()])
        if len(self._left) >= _MOST_LEFT:
            raise OSError(f"{_MOST_LEFT} earlier attempts have not ended")
        answer: Future[_Answer] = Future()

        def run() -> None:
            try:
                answer.set_result(self._exchange(request))
            except Exception as error:  # noqa: BLE001 (the thread that waits raises it)
                answer.set_exception(error)

        # looking up a name has no time limit, and a socket's begins again with each byte: such an attempt is left to end by itself
        thread = threading.Thread(target=run, name=ATTEMPT, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # none can be started any more, as at a program's end from Python 3.12 on
            run()
        try:
            return answer.result(max(0.0, request.ends - time.monotonic()))
        except Late as error:
            self._left.add(thread)
            raise OSError("no answer in time") from error

    def _exchange(self, request: _Timed) -> _Answer:
        left_s = request.ends - time.monotonic()
        if left_s <= 0:
            raise OSError("no attempt in time")
        try:
            response: Any = self._opener.open(request, timeout=left_s)
        except HTTPError as error:
            response = error
        with response:
            answer = b""
            while chunk := response.read1(65_536):  # a server that sends slowly must not hold us beyond the deadline
                answer += chunk
                if len(answer) > _LONGEST_ANSWER or time.monotonic() > request.ends:
                    raise OSError("the answer is too long or too slow")
            if len(answer) < int(response.headers.get("content-length") or 0):
                raise http.client.IncompleteRead(answer)
            return response.status, _seconds(response.headers.get("retry-after")), answer


def _ends(deadline_s: float, since: float | None) -> float:
    return (time.monotonic() if since is None else since) + deadline_s


def _read(answer: bytes, read: Callable[[Any], _Read]) -> _Read:
    """Raises HTTPException for what no gateway says: a proxy's or a login page's answer, which another attempt may get past."""
    try:
        return read(json.loads(answer))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise http.client.HTTPException("the answer is no gateway's") from error


def _naming(user: str) -> dict[str, str]:
    """The header that names a user, in UTF-8."""
    return {"x-ostinato-user": user.encode().decode("latin-1")}


def _pauses() -> Iterator[float]:
    """Growing pauses between attempts, jittered so that many clients do not retry together."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s * random.uniform(0.5, 1.0)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _refused(status: int, answer: bytes) -> str:
    """The server's explanation; raises if another attempt cannot help."""
    message, field = _explanation(answer)
    if status >= 500 or status in _RETRIED:
        return message
    if status in (401, 403):
        raise NotAllowed(message)
    raise Refused(message, field=field)


def _explanation(answer: bytes) -> tuple[str, str | None]:
    try:
        error = json.loads(answer)["error"]
        return str(error["message"]), error.get("param")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return answer[:200].decode(errors="replace") or "no explanation", None


def _seconds(header: str | None) -> float:
    try:
        return max(0.0, float(header or 0))
    except ValueError:  # a date, which is ignored: the next attempt will tell
        return 0.0
