"""Origin checks for a server without keys. It trusts every client, so it answers only to its own names, to local pages, and to no proxy.

A web page can make a browser send requests to this machine, and, by pointing its own name at 127.0.0.1, even read the responses
(DNS rebinding). Both show in the headers: the page's host name is in Origin or Host. Requests through a reverse proxy also come from this
machine, on behalf of anyone who can reach the proxy; most proxies announce themselves in the headers.

A page of this machine or of an allowed host may read the responses (CORS), even on a server with keys. Cookies never authenticate such
requests.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from urllib.parse import urlsplit

from ostinato.core.errors import OstinatoError
from ostinato.serve.auth import is_loopback

Headers = list[tuple[bytes, bytes]]

_PROXIES = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
_ORIGIN = re.compile(rb"[\x21-\x7e]{1,256}")
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2048}")  # a list of header names
_PREFLIGHT_S = b"600"  # how long a browser may cache a preflight response


class WrongHost(OstinatoError):
    """The request's Host header holds a name that is not this server's."""

    status = 421
    code = "wrong_host"


class CrossSite(OstinatoError):
    """The request comes from a web page of another site."""

    status = 403
    code = "cross_site"


class Forwarded(OstinatoError):
    """The request came through a proxy, so its real client could be identified only by a key."""

    status = 403
    code = "forwarded"


class Origins:
    """Checks where a request comes from, on a server without keys.

    Args:
        checked: False if keys are required, which foreign pages do not have; they may not read responses in either case.
        allowed: host names besides loopback's. "*" allows any name, but still no proxy.

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

    def check_page(self, headers: Mapping[bytes, bytes], path: str) -> None:
        """Check a request for our web page, as `check` does. Without keys, another site may only navigate to "/", not load pages unseen."""
        self.check(headers)
        foreign = self._checked and headers.get(b"sec-fetch-site") == b"cross-site"
        if foreign and not (path == "/" and headers.get(b"sec-fetch-mode") == b"navigate"):
            raise CrossSite("This server has no keys, and another site asked for its page; open the page itself.")

    def sharing(self, headers: Mapping[bytes, bytes]) -> Headers:
        """Return the CORS headers that let the page which sent a request read the response. Empty if no page sent it, or a site that is not
        allowed.
        """
        origin = headers.get(b"origin")
        if origin is None or not _ORIGIN.fullmatch(origin) or (self._named and not self._is_ours(_name(origin))):
            return []
        try:
            self.check(headers)
        except OstinatoError:
            return []
        return [
            (b"access-control-allow-origin", origin),
            (b"access-control-expose-headers", b"*"),
            (b"vary", b"Origin"),
        ]

    @staticmethod
    def preflight(headers: Mapping[bytes, bytes], methods: Collection[str]) -> Headers:
        """Return the headers of a preflight response besides `sharing`: these methods, and the headers that the browser asks for."""
        names = headers.get(b"access-control-request-headers", b"")
        response = [
            (b"access-control-allow-methods", ", ".join(methods).encode()),
            (b"access-control-max-age", _PREFLIGHT_S),
        ]
        if _NAMES.fullmatch(names):
            response.append((b"access-control-allow-headers", names))
        if b"access-control-request-private-network" in headers:
            response.append((b"access-control-allow-private-network", b"true"))
        return response

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
    """Return the host name in an origin or in `//host`; "" if there is none."""
    try:
        return urlsplit(url.decode("latin-1")).hostname or ""
    except ValueError:
        return ""
