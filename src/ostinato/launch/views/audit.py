"""The run's audit trail: `audit.jsonl`, append-only, one line per action. It holds fingerprints of keys, never a key."""

from __future__ import annotations

import contextlib
import getpass
from collections import Counter
from collections.abc import Generator
from pathlib import Path

from ostinato.app.storage import Home
from ostinato.core.clock import wall_clock
from ostinato.core.errors import OstinatoError
from ostinato.core.fair_share import Bucket
from ostinato.core.seams import Clock
from ostinato.launch.views.progress import Progress

_BURST, _PERIOD_S = 20.0, 180.0
"""Rate limit of strangers' lines per tenant: a burst of 20, then one every 180 seconds, so that nobody can push operators' actions out of
the file.
"""


class AuditFile:
    """Implements `core.audit.Audit`. If a line cannot be written, as on a full disk, a warning is logged and the action goes on.

    A file of 16 MB is renamed to `audit.1.jsonl` and replaces the previous one. Lines about strangers are rate-limited; `left_out` of the
    next line counts the dropped ones.
    """

    def __init__(self, path: Path, clock: Clock = wall_clock) -> None:
        self._lines, self._clock = Progress(path), clock
        self._strangers, self._left_out = dict[str, Bucket](), Counter[str]()  # by tenant

    def __call__(
        self,
        act: str,
        *,
        result: str,
        key: str = "",
        tenant: str = "",
        address: str = "",
        stranger: bool = False,
        **facts: str,
    ) -> None:
        more: dict[str, object] = {name: value[:200] for name, value in facts.items()}
        if stranger:
            now = self._clock()
            limit = self._strangers.setdefault(tenant, Bucket(rate=1.0 / _PERIOD_S, size=_BURST, now=now))
            if limit.take(1.0, now):
                self._left_out[tenant] += 1
                return
            if left_out := self._left_out.pop(tenant, 0):
                more["left_out"] = left_out
        self._lines.write(act, result=result, key=key, tenant=tenant, address=address, **more)


@contextlib.contextmanager
def audited(place: Home, act: str, **facts: str) -> Generator[None]:
    """Record a person's action at this machine's terminal, with its result."""
    audit = AuditFile(place.audit)
    try:
        yield
    except OstinatoError as error:
        audit(act, result=error.code, address="terminal", stranger=False, **facts)
        raise
    audit(act, result="done", address="terminal", stranger=False, **facts)


def login() -> str:
    """Return the name of the user who runs the command, for the release ledger and the audit trail."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container the user may have no name
        return "command line"
