"""Who may call: API keys, the admin key, and the rule that a server without keys stays on this machine.

Keys are compared in constant time and never appear in messages, logs or metrics.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pydantic import SecretStr

from ostinato.core.errors import BadConfig, Unauthorized

MIN_KEY_CHARS = 16
DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """Who sent a request. `admin` may name a weight slot."""

    tenant: str = DEFAULT_TENANT
    admin: bool = False


class Keyring:
    """The configured keys.

    Args:
        api_keys: entries "key" or "tenant:key"; empty means that everyone on this machine is let in.
        admin_key: the operator's key, or None.

    Raises:
        BadConfig: a key is shorter than 16 characters, occurs twice, or its tenant's name is malformed.
    """

    def __init__(self, api_keys: Sequence[SecretStr] = (), admin_key: SecretStr | None = None) -> None:
        self._tenants: list[tuple[bytes, str]] = []
        for number, entry in enumerate(api_keys):
            key, tenant = _split(entry.get_secret_value(), f"serve.api_keys[{number}]")
            if any(key == known for known, _ in self._tenants):
                raise BadConfig(f"serve.api_keys[{number}] repeats an earlier key; give each client its own.")
            self._tenants.append((key, tenant))
        self._admin = None
        if admin_key is not None:
            self._admin = _strong(admin_key.get_secret_value(), "serve.admin_key")
            if any(self._admin == key for key, _ in self._tenants):
                raise BadConfig("serve.admin_key is also an API key; clients would be operators. Choose another.")

    @property
    def open(self) -> bool:
        """True if no key is asked for."""
        return not self._tenants

    def identify(self, headers: Mapping[str, str]) -> Principal:
        """The sender of a request with these headers (lower-case names). Raises Unauthorized."""
        presented = [value.encode() for value in _presented(headers)]
        admin = self._admin is not None and _among(presented, self._admin)
        tenant = None
        for key, name in self._tenants:  # no early exit: the time must not tell which key came close
            if _among(presented, key):
                tenant = name
        if tenant is None and not admin and not self.open:
            raise Unauthorized("Missing or wrong API key; send 'Authorization: Bearer <key>' or 'x-api-key: <key>'.")
        return Principal(tenant=tenant or DEFAULT_TENANT, admin=admin)


def check_bind(host: str, api_keys: Sequence[object]) -> None:
    """Refuse to listen beyond this machine without keys. Raises BadConfig.

    Example: ``check_bind("0.0.0.0", [])`` raises; ``check_bind("127.0.0.1", [])`` does not.
    """
    if api_keys or _is_loopback(host):
        return
    raise BadConfig(
        f"serve.host is {host!r} but serve.api_keys is empty: anyone who can reach it could use and teach the model. "
        "Set an API key, or bind to 127.0.0.1."
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _split(entry: str, where: str) -> tuple[bytes, str]:
    tenant, colon, key = entry.partition(":")
    if not colon:
        return _strong(entry, where), DEFAULT_TENANT
    if not _TENANT.fullmatch(tenant):
        raise BadConfig(f"{where}: the tenant before ':' may hold 1-64 letters, digits, '_', '.' and '-'.")
    return _strong(key, where), tenant


def _strong(key: str, where: str) -> bytes:
    if len(key) < MIN_KEY_CHARS or len(set(key)) < 6:
        raise BadConfig(f"{where} is too weak: use at least {MIN_KEY_CHARS} random characters.")
    return key.encode()


def _presented(headers: Mapping[str, str]) -> list[str]:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    bearer = token.strip() if scheme.lower() == "bearer" else ""
    return [key for key in (bearer, headers.get("x-api-key", ""), headers.get("x-ostinato-key", "")) if key]


def _among(presented: Sequence[bytes], key: bytes) -> bool:
    found = False
    for candidate in presented:
        found |= hmac.compare_digest(candidate, key)
    return found
