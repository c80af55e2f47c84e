"""What `ostinato status` says of the release controller beyond its ledger lines: what waits for whom."""

from __future__ import annotations

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from ostinato.launch.views.spans import ago
from ostinato.release.ledger import State


def releasing(state: State, now: float) -> list[RenderableType]:
    """What a person is waited for."""
    proposal = state.proposal
    if proposal is None:
        return []
    said = f"v{proposal.candidate.number} has passed and waits for approval since {ago(now - proposal.at)}"
    if proposal.actor is not None:
        return [Text(f"{said}; {proposal.actor} approved it, and the release worker is about to ship it", "yellow")]
    return [
        Text(f"{said}: {proposal.reason}", "yellow"),
        Text("`ostinato approve` puts it before users, `ostinato refuse` blocks it", "yellow"),
    ]


def releasing_json(state: State) -> dict[str, Any]:
    """The same for scripts. `awaits_approval` is null where nothing does; `approved_by` while what was approved is not live yet."""
    proposal = state.proposal
    return {
        "awaits_approval": proposal
        and {
            "number": proposal.candidate.number,
            "hash": proposal.candidate.hash,
            "against": proposal.against.number,
            "reason": proposal.reason,
            "since": proposal.at,
            "approved_by": proposal.actor,
        }
    }
