"""Authentication: API keys, admin keys, user signatures, and the rule that a server without keys listens on loopback only.

Secrets are compared in constant time and never appear in messages, logs or metrics.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import stat
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic import SecretStr

from ostinato.core.audit import Audit, fingerprint
from ostinato.core.errors import BadConfig, Unauthorized
from ostinato.core.seams import Clock
from ostinato.serve.config import PrivacyConfig, ServeConfig

if TYPE_CHECKING:  # commands that only inspect a run need no web server
    from starlette.types import Scope

MIN_KEY_CHARS = 16
DEFAULT_TENANT = "default"
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SIGNATURE = re.compile(r"(\d{1,12})\.([0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The authenticated sender of a request. An `admin` may name a weight slot and read all metrics.

    Example: ``Principal(tenant="acme", admin=False)``
    """

    tenant: str = DEFAULT_TENANT
    admin: bool = False


class Keyring:
    """The configured keys. Keys are looked up by a keyed digest whose secret only this process has, so timing reveals nothing about them.

    Args:
        api_keys: entries "key" or "tenant:key". Empty: requests are not authenticated.
        admin_keys: the operator's keys.
        own: how many of `api_keys` come from the configuration; the rest come from the key file. Used in error messages. None: all.
        metrics_key: a key that reads the metrics and nothing else; None: there is none.

    Raises:
        BadConfig: a key is weak (fewer than 16 characters, or than 6 different ones), occurs twice, or its tenant's name is malformed.
    """

    def __init__(
        self,
        api_keys: Sequence[SecretStr] = (),
        admin_keys: Sequence[SecretStr] = (),
        own: int | None = None,
        metrics_key: SecretStr | None = None,
    ) -> None:
        self._mask = secrets.token_bytes(32)
        self._open = not api_keys
        self._tenants = self._clients(api_keys, own)
        self._known = frozenset({*self._tenants.values(), DEFAULT_TENANT})
        self._admins = {self._digest(_checked_key(key.get_secret_value(), "serve.admin_key")) for key in admin_keys}
        self._metrics_digest = b""
        if metrics_key is not None:
            self._metrics_digest = self._digest(_checked_key(metrics_key.get_secret_value(), "serve.metrics_key"))
            if self._metrics_digest in self._admins:
                raise BadConfig(
                    "serve.metrics_key equals serve.admin_key; choose another one, which opens nothing else."
                )
        self._check_apart(self._tenants)

    def renew(self, api_keys: Sequence[SecretStr], own: int | None = None) -> frozenset[str]:
        """Replace the clients' keys from the next request on. Return the new tenants: their keys are rejected until a restart, because
        per-tenant state is created at startup. Raises BadConfig; the keys are then unchanged.
        """
        clients = self._clients(api_keys, own)
        self._check_apart(clients)
        self._tenants = {digest: tenant for digest, tenant in clients.items() if tenant in self._known}
        return frozenset(clients.values()) - self._known

    def _clients(self, api_keys: Sequence[SecretStr], own: int | None) -> dict[bytes, str]:
        """Return {digest of a key: its tenant}. Raises BadConfig."""
        tenants: dict[bytes, str] = {}
        for number, entry in enumerate(api_keys):
            name = f"serve.api_keys[{number}]"
            if own is not None and number >= own:
                name = f"serve.api_keys_file, key {number - own + 1}"
            key, tenant = _split(entry.get_secret_value(), name)
            digest = self._digest(key)
            if digest in tenants:
                raise BadConfig(f"{name} repeats an earlier key; give each client its own.")
            tenants[digest] = tenant
        return tenants

    def _check_apart(self, clients: Mapping[bytes, str]) -> None:
        if self._admins & clients.keys():
            raise BadConfig("serve.admin_key is also an API key; clients would be operators. Choose another.")
        if self._metrics_digest in clients:
            raise BadConfig("serve.metrics_key is also an API key; that client would see all metrics. Choose another.")

    @property
    def open(self) -> bool:
        """True if no key is required."""
        return self._open

    @property
    def tenants(self) -> frozenset[str]:
        """All tenants that a request can belong to. An operator's own calls belong to the default tenant."""
        return self._known

    def identify(self, headers: Mapping[bytes, bytes]) -> Principal:
        """Return the sender of a request with these headers (lower-case names). Raises Unauthorized."""
        digests = [self._digest(key) for key in presented_keys(headers)]
        admin = any(digest in self._admins for digest in digests)
        tenant = next((self._tenants[digest] for digest in digests if digest in self._tenants), None)
        if tenant is None and not admin and not self.open:
            raise Unauthorized("Missing or wrong API key; send 'Authorization: Bearer <key>' or 'x-api-key: <key>'.")
        return Principal(tenant=tenant or DEFAULT_TENANT, admin=admin)

    def is_admin(self, key: bytes) -> bool:
        """True if this is an operator's key."""
        return self._digest(key) in self._admins

    def known(self, headers: Mapping[bytes, bytes]) -> Principal | None:
        """Return the sender like `identify`, but None instead of raising."""
        try:
            return self.identify(headers)
        except Unauthorized:
            return None

    def wrong_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the key in these headers if it is invalid; None if there is none or it is valid."""
        given = presented_keys(headers)
        return given[0] if given and self.known(headers) is None else None

    def may_scrape(self, headers: Mapping[bytes, bytes]) -> bool:
        """True if these headers hold the metrics key."""
        return any(self._digest(key) == self._metrics_digest for key in presented_keys(headers))

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._mask, digest_size=32).digest()


def key_holders(api_keys: Sequence[SecretStr]) -> frozenset[str]:
    """Return the tenants that have a key. Raises BadConfig."""
    return frozenset(_split(key.get_secret_value(), "serve.api_keys")[1] for key in api_keys)


def client_keys(api_keys: Sequence[SecretStr], file: Path | None) -> tuple[SecretStr, ...]:
    """Return all client keys: those of the configuration, then those of the file, one per line. Each call reads the file anew.

    Lines that begin with # are comments. Raises BadConfig (without showing a key) if the file cannot be read, grants others any permission,
    has a line that is not a key, or holds no key.
    """
    if file is None:
        return tuple(api_keys)
    mode, lines = _read_keys(file)
    if mode & 0o007:
        raise BadConfig(
            f"serve.api_keys_file: every user may access {file} (mode {mode:03o}); remove that permission: chmod o= {file}"
        )
    keys: list[SecretStr] = []
    for number, line in enumerate(lines, 1):
        if line.startswith("#"):
            continue
        if len(line.split()) > 1:
            raise BadConfig(
                f"serve.api_keys_file: line {number} of {file} contains a space; write one key per line, as in acme:sk-..."
            )
        if line:
            keys.append(SecretStr(line))
    if not keys:
        raise BadConfig(f"serve.api_keys_file: {file} contains no key; write one per line, as in acme:sk-...")
    return (*api_keys, *keys)


def _read_keys(file: Path) -> tuple[int, list[str]]:
    """Return the file's mode and its lines. Raises BadConfig."""
    try:
        # O_NONBLOCK: opening a pipe without a writer must not block startup
        descriptor = os.open(file.expanduser(), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, encoding="utf-8-sig") as opened:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BadConfig(
                    f"serve.api_keys_file: {file} is not a file; name one with a key per line, as in acme:sk-..."
                )
            return stat.S_IMODE(status.st_mode), [line.strip() for line in opened]
    except RuntimeError as error:
        raise BadConfig(f"serve.api_keys_file: {file}: {error}; write the whole path") from None
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise BadConfig(
            f"serve.api_keys_file: {file} cannot be read by user {os.getuid()}: {why}; name a file with a key per line, as in acme:sk-..."
        ) from None


class UserKeys:
    """The secrets with which tenants sign their users' names (`X-Ostinato-User-Signature`).

    A signature is ``<expires>.<hex>``: Unix seconds, and the HMAC-SHA256 of ``"<expires>.<user>"`` in UTF-8 under the secret.

    Args:
        entries: "secret" or "tenant:secret"; a tenant may have several, so that they can be rotated.

    Raises:
        BadConfig: a secret is weak (fewer than 16 characters, or than 6 different ones) or its tenant's name is malformed.
    """

    def __init__(self, entries: Sequence[SecretStr] = ()) -> None:
        self._secrets: defaultdict[str, list[bytes]] = defaultdict(list)
        for number, entry in enumerate(entries):
            secret, tenant = _split(entry.get_secret_value(), f"serve.user_keys[{number}]")
            self._secrets[tenant].append(secret)

    def check(self, tenant: str, user: str, signature: str, now: float) -> None:
        """Raise Unauthorized unless this tenant has signed this user and the signature has not expired."""
        parts = _SIGNATURE.fullmatch(signature)
        if parts is None:
            raise Unauthorized(
                "X-Ostinato-User-Signature is malformed; it is '<Unix seconds>.<64 hexadecimal digits>'."
            )
        expires, given = parts[1], parts[2].encode()
        message = f"{expires}.{user}".encode()
        matches = False
        for secret in self._secrets.get(tenant, []):  # no early exit: the time must not reveal which secret matched
            matches |= hmac.compare_digest(hmac.new(secret, message, hashlib.sha256).hexdigest().encode(), given)
        if not matches:
            raise Unauthorized(
                "X-Ostinato-User-Signature does not match this user; sign the same name with a secret of serve.user_keys."
            )
        if now > float(expires):
            raise Unauthorized("X-Ostinato-User-Signature has expired; sign the user again.")


def check_bind(host: str, api_keys: Sequence[object]) -> None:
    """Refuse to listen on a non-loopback address without keys. Raises BadConfig.

    Example: ``check_bind("0.0.0.0", [])`` raises; ``check_bind("127.0.0.1", [])`` does not.
    """
    if api_keys or is_loopback(host):
        return
    raise BadConfig(
        f"listen.host is {host!r} but serve.api_keys is empty: anyone who can reach it could use and teach the model. "
        'Set a key, as in serve.api_keys = ["acme:sk-..."], name a file of keys in serve.api_keys_file, or listen on 127.0.0.1.'
    )


def check_tenants(
    config: ServeConfig, privacy: PrivacyConfig, known: Collection[str], *, adapted: Collection[str] = ()
) -> None:
    """Raise BadConfig if a setting names a tenant without a key, where it would have no effect.

    Checked are `serve.tenant_quotas`, `serve.sampling`, `serve.branches`, Auto's arms, the judge, `privacy.tenants` and `adapt.tenants`
    (`adapted`).
    """
    for field, named in (
        ("serve.tenant_quotas", {*config.tenant_quotas}),
        ("serve.sampling", {*config.sampling} - {"*"}),
        ("serve.branches", {*config.branches}),
        ("serve.auto.arms: tenants", {tenant for arm in config.auto.arms for tenant in arm.tenants}),
        ("serve.judge.tenants", {*config.judge.tenants}),
        ("privacy.tenants", {*privacy.tenants}),
        ("adapt.tenants", {*adapted}),
    ):
        for tenant in sorted(named - set(known)):
            close = get_close_matches(tenant, sorted(known), n=1, cutoff=0.4)
            near = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(sorted(known))}."
            raise BadConfig(
                f"{field}: no key belongs to a tenant {tenant!r}; {near} A key names its tenant before the ':'."
            )


def is_loopback(host: str) -> bool:
    """True for a loopback name or address (IPv6 with or without brackets).

    Example: ``is_loopback("[::1]") and is_loopback("localhost") and not is_loopback("localhost.example.org")``
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _split(entry: str, where: str) -> tuple[bytes, str]:
    tenant, colon, key = entry.partition(":")
    if not colon:
        return _checked_key(entry, where), DEFAULT_TENANT
    if not _TENANT.fullmatch(tenant):
        raise BadConfig(f"{where}: the tenant before ':' may hold 1-64 letters, digits, '_', '.' and '-'.")
    return _checked_key(key, where), tenant


def _checked_key(key: str, where: str) -> bytes:
    if len(key) < MIN_KEY_CHARS or len(set(key)) < 6:
        raise BadConfig(f"{where} is too weak: use at least {MIN_KEY_CHARS} random characters.")
    return key.encode()


def presented_keys(headers: Mapping[bytes, bytes]) -> list[bytes]:
    """Return the keys in a request's headers, valid or not."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    bearer = token.strip() if scheme.lower() == b"bearer" else b""
    return [key for key in (bearer, headers.get(b"x-api-key"), headers.get(b"x-ostinato-key")) if key]


# ---------------------------------------------------------------- the key file


_LOG = logging.getLogger(__name__)

LOOK_S = 1.0
_Stamp = tuple[int, ...] | None

Renew = Callable[[Sequence[SecretStr]], frozenset[str]]
"""Replaces the clients' keys; returns the tenants that need a restart. Raises BadConfig."""


class KeyFile:
    """The client keys of `serve.api_keys` and `serve.api_keys_file`. Raises BadConfig like `client_keys`.

    Example: ``keys = Keyring(KeyFile(config).keys)``
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        # taken before the keys are read, so that no change is missed
        self._read = self._seen = _stamp(config.api_keys_file)
        self._last_error = ""
        self.keys = client_keys(config.api_keys, config.api_keys_file)

    async def watch(self, renew: Renew, look_s: float = LOOK_S) -> NoReturn:
        """Poll the file every `look_s` seconds until cancelled, and call `renew` when it has changed.

        An unusable file leaves the keys as they are, is logged, and is tried again: the change may have withdrawn a key.
        """
        while True:
            await asyncio.sleep(look_s)
            stamp = await asyncio.to_thread(_stamp, self._config.api_keys_file)
            settled, self._seen = stamp == self._seen, stamp
            # reload only once the file has stopped changing, so that a writer can finish
            if settled and stamp != self._read and await self._renewed(renew):
                self._read = stamp

    async def _renewed(self, renew: Renew) -> bool:
        try:
            keys = await asyncio.to_thread(client_keys, self._config.api_keys, self._config.api_keys_file)
            new_tenants = renew(keys)
        except BadConfig as error:
            if str(error) != self._last_error:
                _LOG.error("the keys stay unchanged: %s", error)
            self._last_error = str(error)
            return False
        self._last_error = ""
        _LOG.info("serve.api_keys_file has changed: %d keys are valid now", len(keys))
        if new_tenants:
            _LOG.warning(
                "the keys of new tenants (%s) are refused until the gateway is restarted",
                ", ".join(sorted(new_tenants)),
            )
        return True


def _stamp(file: Path | None) -> _Stamp:
    """Return a value that changes when the file is written, replaced or given other permissions; None if the file is missing."""
    if file is None:
        return None
    try:
        status = file.expanduser().stat()
    except (OSError, RuntimeError):
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode


# ---------------------------------------------------------------- the audit trail


_CHOICE_EVERY_S = 3600.0
_MAX_CHOICES = 1024
_SLOT = b"x-ostinato-slot"


class KeyAudit:
    """Writes wrong keys and operators' choices of weights to the audit trail, the latter once an hour per key, address and slot."""

    def __init__(self, audit: Audit, keys: Keyring, clock: Clock) -> None:
        self._audit, self._keys, self._clock = audit, keys, clock
        self._chosen: dict[tuple[str, str, str], float] = {}

    def answered(self, scope: Scope, headers: Mapping[bytes, bytes], status: int) -> None:
        """Record an answered request if it matters. For nearly all requests this costs two comparisons."""
        if status == 401:
            self._wrong(scope, headers)
        elif _SLOT in headers and status < 400:
            self._choice(scope, headers)

    def _wrong(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        key = self._keys.wrong_key(headers)
        if key is not None:
            self._audit(
                "wrong key",
                result="refused",
                key=fingerprint(key),
                address=address_of(scope),
                stranger=True,
                path=str(scope["path"])[:200],
            )

    def _choice(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        who = self._keys.known(headers)
        if who is None or not who.admin:  # None: the key was revoked while the answer was generated
            return
        key = next((fingerprint(each) for each in presented_keys(headers) if self._keys.is_admin(each)), "")
        slot, now = headers[_SLOT].decode("latin-1")[:100], self._clock()
        chosen = (key, address_of(scope), slot)
        if 0.0 <= now - self._chosen.get(chosen, -_CHOICE_EVERY_S) < _CHOICE_EVERY_S:
            return
        if len(self._chosen) >= _MAX_CHOICES:
            self._chosen.clear()
        self._chosen[chosen] = now
        self._audit("chose a slot", result="done", key=key, tenant=who.tenant, address=chosen[1], slot=slot)


def address_of(scope: Mapping[str, Any]) -> str:
    """Return the address from which a request came; behind a proxy, the proxy's."""
    client = scope.get("client")
    return "" if client is None else str(client[0])
