"""A candidate that has passed and waits until a person says yes or no, as the ledger has it."""

from __future__ import annotations

from dataclasses import dataclass

from ostinato.core.records import PolicyVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """It holds as long as `against` is live. `actor` is who approved it, None while nobody did, and `why` their reason.

    `salt` is its trial's, None where it passed without one; `better`: the gate proved it better than the best so far.

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
