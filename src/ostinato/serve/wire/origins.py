"""Origin checks for a server without keys. It trusts every client, so it answers only to its own names, to local pages, and to no proxy.

A web page can make a browser send requests to this machine, and, by pointing its own name at 127.0.0.1, even read the responses
(DNS rebinding). Both show in the headers: the page's host name is in Origin or Host. Requests through a reverse proxy also come from this
machine, on behalf of anyone who can reach the proxy; most proxies say so in the headers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from ostinato.core.errors import OstinatoError
from ostinato.serve.auth import is_loopback

_PROXIES = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})


class WrongHost(OstinatoError):
    """The request's Host header holds a name that is not this server's."""

    status = 421
    code = "wrong_host"


class CrossSite(OstinatoError):
    """The request comes from a web page of another site."""

    status = 403
    code = "cross_site"


class Forwarded(OstinatoError):
    """The request came through a proxy, from a client that could only be identified by a key."""

    status = 403
    code = "forwarded"


class Origins:
    """Checks where a request comes from, on a server without keys.

    Args:
        checked: False if keys are required, since foreign pages do not have them.
        allowed: host names besides loopback's; "*" allows any name, but still no proxy.

    Example: ``Origins(checked=True, allowed=("box.local",)).check({b"host": b"127.0.0.1:8321"})``
    """

    def __init__(self, *, checked: bool, allowed: Sequence[str]) -> None:
        self._checked = checked
        self._named = "*" not in allowed
        self._allowed = frozenset(name.lower() for name in allowed)
        self._known: set[bytes] = set()

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise Forwarded, WrongHost or CrossSite for a request with these headers (lower-case names)."""
        if not self._checked:
            return
        if not _PROXIES.isdisjoint(headers):
            raise Forwarded(
                "This server has no keys, so it is for this machine alone, and this request came through a proxy; "
                "set serve.api_keys."
            )
        if not self._named:
            return
        host = headers.get(b"host", b"")
        if host not in self._known:
            self._check_host(host)
        origin = headers.get(b"origin")
        if origin is not None and not self._is_ours(_name(origin)):
            raise CrossSite(
                f"This server has no keys and takes no requests from pages of {origin[:200].decode('latin-1')!r}; "
                "set serve.api_keys, or name the page's host in serve.allowed_hosts."
            )

    def _check_host(self, host: bytes) -> None:
        if not self._is_ours(_name(b"//" + host)):
            raise WrongHost(
                f"This server has no keys and does not answer to the name {host[:200].decode('latin-1')!r}; "
                "set serve.api_keys, or add the name to serve.allowed_hosts."
            )
        if len(self._known) < 64:
            self._known.add(host)

    def _is_ours(self, name: str) -> bool:
        return name in self._allowed or is_loopback(name)


def _name(url: bytes) -> str:
    """The host name in an origin or in `//host`; "" if there is none."""
    try:
        return urlsplit(url.decode("latin-1")).hostname or ""
    except ValueError:
        return ""
