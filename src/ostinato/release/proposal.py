"""A candidate that has passed and waits for a person's decision, as recorded in the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.records import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Valid as long as `against` is live. `actor` is the person who approved it, None before that, and `why` their reason.

    `salt` is its trial's salt, None if it passed without a trial; `better`: the gate proved it better than the best so far.

    Example: ``Proposal(candidate=v9, against=v8, reason="not worse than the margins", at=60.0, salt="9f2c", better=False)``
    """

    candidate: PolicyVersion
    against: PolicyVersion
    reason: str
    at: float
    salt: str | None
    better: bool
    actor: str | None = None
    why: str = ""
