"""Who looks at the page, as far as the rooms that answer need to know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Visitor:
    """Somebody with a browser. `tenant`: whose turns they see, None for everybody's; `operator`: they may ship and roll back.

    Example: ``Visitor(tenant="acme", operator=False)`` sees what acme's users were answered, and nothing of the run.
    """

    tenant: str | None
    operator: bool

    @property
    def sees_all(self) -> bool:
        """True if nothing of the run is hidden from them."""
        return self.tenant is None


class Visitors(Protocol):
    """Tells visitors from strangers."""

    def visitor(self, headers: Mapping[bytes, bytes]) -> Visitor | None:
        """Who sent a request with these headers (lower-case names); None if they must sign in first."""
        ...

    def cookie(self, key: str) -> str | None:
        """What a browser keeps so that its next requests are known, for as long as `cookie_s`; None for a wrong key."""
        ...

    @property
    def cookie_s(self) -> int:
        """How long a cookie holds, in seconds."""
        ...
