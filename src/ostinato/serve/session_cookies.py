"""Sign-in to the web page: the visitor enters a key once, in a form, and gets a cookie that does not contain the key.

The cookie holds a digest of the key, its expiry time, and an HMAC under a secret derived from all keys. It survives a restart of the
gateway and becomes invalid when any key changes, even while the gateway runs. Browsers do not send it with other sites' requests
(SameSite=Strict), but they do send it to every port of this host, which is why it is not the key itself.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence

from pydantic import SecretStr
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from ostinato.core.audit import fingerprint
from ostinato.core.errors import OstinatoError
from ostinato.core.seams import Clock
from ostinato.core.visitors import Visitor
from ostinato.serve.auth import Keyring, presented_keys
from ostinato.serve.dialects.openai_reply import error_body, json_bytes
from ostinato.serve.wire.origins import Origins

COOKIES = ("ostinato", "__Host-ostinato")
"""The cookie's names. Browsers accept the second over HTTPS only."""
_COOKIE_S = 12 * 3600
_MOST_COOKIES = 8  # cookies of these names that are checked per request
_TOKEN = re.compile(r"(\d{1,12})\.([0-9a-f]{32})\.([0-9a-f]{64})")


class SessionCookies:
    """Implements `core.visitors.Visitors` with signed session cookies for the configured keys.

    Args:
        keys: identifies the owner of a key.
        api_keys: the clients' keys, each 'key' or 'tenant:key'.
        admin_keys: the operators' keys.
        clock: Unix seconds.
        secure: browsers must send the cookie over HTTPS only.
    """

    def __init__(
        self,
        keys: Keyring,
        api_keys: Sequence[SecretStr],
        admin_keys: Sequence[SecretStr],
        clock: Clock,
        *,
        secure: bool = False,
    ) -> None:
        self._keys = keys
        self._clock = clock
        self._secure = secure
        self._signed_out = dict[str, int]()  # signed-out cookies: MAC -> expiry time
        self._admins = [key.get_secret_value() for key in admin_keys]
        self.renew(api_keys)

    def renew(self, api_keys: Sequence[SecretStr]) -> None:
        """Replace the clients' keys. All cookies issued before become invalid."""
        entries = [entry.get_secret_value() for entry in api_keys]
        clients = [entry.partition(":")[2] or entry for entry in entries]
        every = sorted(key.encode() for key in [*clients, *self._admins])
        self._seal = hashlib.sha256(b"ostinato page\0" + b"\0".join(every)).digest()
        self._known = {self._key_id(key): key for key in every}

    @property
    def secure(self) -> bool:
        """True if browsers must send the cookie over HTTPS only."""
        return self._secure

    def leave(self, headers: Mapping[bytes, bytes]) -> None:
        """Sign out: the cookie in these headers identifies nobody from now on, until a restart at most.

        At most one cookie per key and second exists, so the list of signed-out cookies stays small.
        """
        now = self._clock()
        self._signed_out = {mac: until for mac, until in self._signed_out.items() if until >= now}
        self._signed_out |= {found[3]: int(found[1]) for found in self._cookies_in(headers)}

    @property
    def cookie_s(self) -> int:
        """How long a cookie is valid, in seconds."""
        return _COOKIE_S

    def visitor(self, headers: Mapping[bytes, bytes]) -> Visitor | None:
        """The visitor by a key in a header, else by the cookie; if no keys are configured, an anonymous one; None if unidentified."""
        return self._by_key(headers) or self._by_cookie(headers) or self._anonymous()

    def wrong_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The key in these headers if it is invalid; None if there is none or it is valid."""
        return self._keys.wrong_key(headers)

    def cookie(self, key: str) -> str | None:
        """Return a cookie's value for a key; None if the key is not valid here."""
        given = key.strip().encode()
        if self._owner_of(given) is None:
            return None
        until = int(self._clock()) + _COOKIE_S
        return f"{until}.{self._key_id(given)}.{self._mac(until, self._key_id(given))}"

    def _anonymous(self) -> Visitor | None:
        return Visitor(tenant=None, operator=False) if self._keys.open else None

    def _by_key(self, headers: Mapping[bytes, bytes]) -> Visitor | None:
        given = {name: headers[name] for name in (b"authorization", b"x-api-key", b"x-ostinato-key") if name in headers}
        return self._visitor(given) if given else None

    def _by_cookie(self, headers: Mapping[bytes, bytes]) -> Visitor | None:
        cookie = next((each for each in self._cookies_in(headers) if each[3] not in self._signed_out), None)
        key = None if cookie is None else self._known.get(cookie[2])
        return None if key is None else self._owner_of(key)

    def _cookies_in(self, headers: Mapping[bytes, bytes]) -> list[re.Match[str]]:
        """The parts of the valid, unexpired cookies of this gateway. Foreign cookies of the same names may precede them, since any site on
        this host may set one.
        """
        names = COOKIES[1:] if self._secure else COOKIES
        sent = (each.strip().partition("=") for each in headers.get(b"cookie", b"").decode("latin-1").split(";"))
        cookies = [each for name, _, value in sent if name in names and (each := _TOKEN.fullmatch(value))][
            :_MOST_COOKIES
        ]
        return [each for each in cookies if self._is_ours(each)]

    def _is_ours(self, cookie: re.Match[str]) -> bool:
        expected = self._mac(int(cookie[1]), cookie[2])
        return float(cookie[1]) >= self._clock() and hmac.compare_digest(expected, cookie[3])

    def _owner_of(self, key: bytes) -> Visitor | None:
        """The visitor to whom a key belongs; None if the key is unknown."""
        if not key or self._key_id(key) not in self._known:
            return None
        return self._visitor({b"x-ostinato-key": key})

    def _visitor(self, headers: Mapping[bytes, bytes]) -> Visitor | None:
        who = self._keys.known(headers)
        if who is None:
            return None
        key = next(
            (fingerprint(each) for each in presented_keys(headers) if not who.admin or self._keys.is_admin(each)), ""
        )
        if who.admin:
            return Visitor(tenant=None, operator=True, key=key)
        return Visitor(tenant=None if self._keys.open else who.tenant, operator=False, key=key)

    def _key_id(self, key: bytes) -> str:
        return hmac.new(self._seal, b"name\0" + key, hashlib.sha256).hexdigest()[:32]

    def _mac(self, until: int, name: str) -> str:
        return hmac.new(self._seal, f"{until}.{name}".encode(), hashlib.sha256).hexdigest()


class OriginCheckedRoute(BaseRoute):
    """A route of the web page behind the gateway's origin check."""

    def __init__(self, inner: BaseRoute, origins: Origins) -> None:
        self._inner, self._origins = inner, origins

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return self._inner.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._origins.check_page(dict(scope["headers"]), scope["path"])
        except OstinatoError as error:
            refusal = Response(json_bytes(error_body(error)), error.status, media_type="application/json")
            await refusal(scope, receive, send)
            return
        await self._inner.handle(scope, receive, send)
