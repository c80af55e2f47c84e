"""What the gateway's calls tell the audit trail: wrong keys, and weights that an operator's key chose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Scope

from ostinato.core.audit import Audit, fingerprint
from ostinato.core.errors import Unauthorized
from ostinato.core.seams import Clock
from ostinato.serve.auth import Keyring, presented

_AGAIN_S = 3600.0
_MOST = 1024
_SLOT = b"x-ostinato-slot"


class KeyAudit:
    """Looks at each answered request. A choice of weights is recorded once an hour for each key, address and slot."""

    def __init__(self, audit: Audit, keys: Keyring, clock: Clock) -> None:
        self._audit, self._keys, self._clock = audit, keys, clock
        self._chosen: dict[tuple[str, str, str], float] = {}

    def answered(self, scope: Scope, headers: Mapping[bytes, bytes], status: int) -> None:
        """Record the request if it matters. Almost none does, and then this costs two comparisons."""
        if status == 401:
            self._wrong(scope, headers)
        elif _SLOT in headers and status < 400:
            self._choice(scope, headers)

    def _wrong(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        given = presented(headers)
        if given and not self._keys.knows(headers):
            self._audit(
                "wrong key",
                result="refused",
                key=fingerprint(given[0]),
                address=address_of(scope),
                path=str(scope["path"])[:200],
            )

    def _choice(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        try:
            who = self._keys.identify(headers)
        except Unauthorized:  # revoked while the answer was made
            return
        if not who.admin:
            return
        key = next((fingerprint(each) for each in presented(headers) if self._keys.is_admin(each)), "")
        slot, now = headers[_SLOT].decode("latin-1")[:100], self._clock()
        chosen = (key, address_of(scope), slot)
        if now - self._chosen.get(chosen, -_AGAIN_S) < _AGAIN_S:
            return
        if len(self._chosen) >= _MOST:
            self._chosen.clear()
        self._chosen[chosen] = now
        self._audit("chose a slot", result="done", key=key, tenant=who.tenant, address=chosen[1], slot=slot)


def address_of(scope: Mapping[str, Any]) -> str:
    """The address that a request came from; behind a proxy, the proxy's."""
    client = scope.get("client")
    return "" if client is None else str(client[0])
