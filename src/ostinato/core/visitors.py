"""The web page's visitors, as far as the rooms that answer them need to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """A person with a browser. `tenant`: the tenant whose turns they see, None for all; `operator`: they may ship and roll back;
    `key`: their key's fingerprint, for the audit trail.

    Example: ``Visitor(tenant="acme", operator=False)`` sees the answers to acme's users, and nothing else of the run.
    """

    tenant: str | None
    operator: bool
    key: str = field(default="", compare=False)

    @property
    def sees_all(self) -> bool:
        """True if nothing in the run is hidden from them."""
        return self.tenant is None


class Visitors(Protocol):
    """Authenticates visitors."""

    def visitor(self, headers: Mapping[bytes, bytes]) -> Visitor | None:
        """Return the sender of a request with these headers (lower-case names); None if they must sign in first."""
        ...

    def wrong_key(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Return the key in these headers if it is invalid; None if there is none, or it is valid."""
        ...

    def cookie(self, key: str) -> str | None:
        """Return the cookie that identifies a browser's later requests, valid for `cookie_s`; None for a wrong key."""
        ...

    def leave(self, headers: Mapping[bytes, bytes]) -> None:
        """Invalidate the cookie in these headers."""
        ...

    @property
    def secure(self) -> bool:
        """True if browsers must send the cookie over HTTPS only, however the request with the key arrived."""
        ...

    @property
    def cookie_s(self) -> int:
        """The lifetime of a cookie, in seconds."""
        ...
