"""Parses and validates query strings and forms."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request

from ostinato.core.errors import BadRequest, OstinatoError, TooLarge
from ostinato.status.index_queries import TurnQuery

FORM_S = 10.0
"""Timeout of a form's body in seconds."""
_LONGEST_FORM = 64 * 1024
_LONGEST_FIELD = 512
_NUMBER = re.compile(r"[0-9]{1,15}")
_ROOT = re.compile(r"[0-9a-f]{6,64}")
_VERSION = re.compile(r"v[0-9]{1,15}")
# unambiguous, so that matching takes linear time (no ReDoS)
_PATH = re.compile(r"/(?:[A-Za-z0-9_:.-]+(?:/[A-Za-z0-9_:.-]+){0,7}/?)?")


class FormLate(OstinatoError):
    """A form's body did not arrive in time."""

    status = 408
    code = "form_late"


def place(fields: Mapping[str, str], name: str) -> int | None:
    """Return a field's whole number, or None if it is empty. A version may be written as v12. Raises BadRequest."""
    text = fields.get(name, "").strip()
    if not text:
        return None
    text = text.removeprefix("v") if name == "version" else text
    if not _NUMBER.fullmatch(text):
        raise BadRequest(f"{name} must be a whole number, not {text[:40]!r}", field=name)
    return int(text)


def words(fields: Mapping[str, str], name: str, longest: int = _LONGEST_FIELD, *, needed: bool = False) -> str:
    """Return a field's stripped text. Raises BadRequest if it is too long, or empty although it is `needed`."""
    text = fields.get(name, "").strip()
    if len(text) > longest:
        raise BadRequest(f"{name} has {len(text)} characters; {longest} are allowed", field=name)
    if needed and not text:
        raise BadRequest(f"{name} is empty; fill it in", field=name)
    return text


def root(text: str) -> str:
    """Return the first digits of a version's hash. Raises BadRequest."""
    if not _ROOT.fullmatch(text):
        raise BadRequest(f"{text[:80]!r} is not a version: give 6 to 64 hexadecimal digits of its hash", field="root")
    return text


def version(text: str) -> str:
    """Return a version's name: live, v12, or the first digits of its hash. Raises BadRequest."""
    if text == "live" or _VERSION.fullmatch(text):
        return text
    if not _ROOT.fullmatch(text):
        raise BadRequest(f"{text[:80]!r} is not a version: give live, v12 or 6 to 64 digits of its hash", field="root")
    return text


def own_path(text: str, host: str = "") -> str:
    """Return a path of this page to redirect to, from a path or, with `host`, from a URL on that host; "/" for anything else.

    Example: ``own_path("http://127.0.0.1:8321/releases/ab12cd", "127.0.0.1:8321") == "/releases/ab12cd"``
    """
    try:
        found = urlsplit(text)
    except ValueError:
        return "/"
    if found.netloc != host or not _PATH.fullmatch(found.path) or found.path in ("/sign-in", "/sign-out"):
        return "/"
    return found.path


def turn_query(fields: Mapping[str, str], tenant: str | None) -> TurnQuery:
    """Return the query for turns. A visitor of one `tenant` gets only its turns, whatever the URL says. Raises BadRequest."""
    return TurnQuery(
        tenant=tenant if tenant is not None else words(fields, "tenant") or None,
        user=words(fields, "user"),
        arm=words(fields, "arm"),
        version=place(fields, "version"),
        outcome=words(fields, "outcome"),
        text=words(fields, "text"),
        before=place(fields, "before"),
        after=place(fields, "after"),
    )


async def form(request: Request) -> Mapping[str, str]:
    """Read the fields of a form; of several with the same name the last counts. Raises BadRequest, TooLarge, FormLate."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise BadRequest(f"A form is application/x-www-form-urlencoded, not {kind[:80]!r}.")
    body = bytearray()
    try:
        async with asyncio.timeout(FORM_S):
            async for piece in request.stream():
                body += piece
                if len(body) > _LONGEST_FORM:
                    raise TooLarge(f"The form is longer than {_LONGEST_FORM} bytes.")
    except TimeoutError:
        raise FormLate(f"The form did not arrive within {FORM_S:g} s; send it again.") from None
    return _parsed(bytes(body))


def _parsed(body: bytes) -> Mapping[str, str]:
    try:
        pairs = parse_qsl(
            body.decode(), keep_blank_values=True, strict_parsing=False, max_num_fields=50, errors="strict"
        )
    except (UnicodeDecodeError, ValueError) as error:
        raise BadRequest("The form cannot be read: it must be UTF-8 with at most 50 fields.") from error
    return dict(pairs)
