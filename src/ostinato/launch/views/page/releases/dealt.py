"""How many people came to each side of a release's trial, by the index, against the shares in force when each first came."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ostinato.core.records import Arm, ReleaseEvent
from ostinato.core.seams import Cursor
from ostinato.launch.views.page.queries import Questions
from ostinato.release.trial.balance import Balance
from ostinato.web.page.releases.evidence import Dealt
from ostinato.web.page.sources import LedgerEvent

MOST_TURNS = 30_000
"""At most so many turns of a trial are read: the first ones, which have the most newcomers. The test may stop anywhere."""
_MOST_ODDS = 700.0  # the logarithm of a number that a float can still hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """From `start` in the log on, `share` of the users get the candidate. `shipped`: it is live, and the others keep the old version."""

    start: Cursor
    share: float
    shipped: bool


def stretches(events: Iterable[LedgerEvent], rows: Mapping[str, ReleaseEvent], root: str) -> list[Stretch]:
    """The shares of a version's newest trial, in order; empty if it had no trial."""
    found: list[Stretch] = []
    for event in sorted(events, key=lambda event: event.seq):
        row = rows.get(event.id)
        share = None if row is None else row.detail.get("share")
        if event.policy.hash != root or not isinstance(share, int | float):
            continue
        if event.action == "canary":
            found = []
        found.append(Stretch(start=event.seq, share=float(share), shipped=event.action == "shipped"))
    return found if found and not found[0].shipped else []


def dealt(questions: Questions, parts: Sequence[Stretch], root: str) -> Dealt | None:
    """The people of a trial; None if there was no trial, nobody came, or its first turns are not in the index yet.

    Raises TooWide, Unavailable.
    """
    if not parts:
        return None
    with questions.open() as db:
        low = db.execute("SELECT value FROM state WHERE name = 'low'").fetchone()
        if low is None or low[0] > parts[0].start:
            return None
        end = db.execute(
            "SELECT min(seq) FROM events WHERE seq > ?1 AND (action IN ('canary', 'rolled_back') OR "
            "(action = 'shipped' AND hash != ?2) OR (action = 'blocked' AND hash = ?2))",
            (parts[0].start, root),
        ).fetchone()[0]
        # until the candidate's weights are loaded everybody gets live, and nobody is dealt
        answered = db.execute(
            "SELECT min(seq) FROM turns WHERE seq > ? AND arm = 'canary'", (parts[0].start,)
        ).fetchone()[0]
        since = parts[0].start if parts[0].shipped or answered is None else answered - 1
        rows = db.execute(
            "SELECT arm, min(seq), count(*) FROM (SELECT tenant, user, arm, seq FROM turns WHERE seq > ? AND seq < ? AND dealt AND "
            f"arm IN ('canary', 'live', 'previous') ORDER BY seq LIMIT {MOST_TURNS}) GROUP BY tenant, user",
            (since, (1 << 62) if end is None else end),
        ).fetchall()
    return counted([(arm, seq) for arm, seq, _ in rows], parts, sum(turns for _, _, turns in rows)) if rows else None


def counted(newcomers: Sequence[tuple[str, Cursor]], parts: Sequence[Stretch], turns: int) -> Dealt:
    """Arm and cursor of each person's first turn -> how many people came to each side."""
    starts = [part.start for part in parts]
    came: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    for arm, seq in newcomers:
        part = max(0, bisect_right(starts, seq) - 1)
        theirs = Arm.LIVE if parts[part].shipped else Arm.CANARY
        came[part][arm != theirs] += 1
    balance, expected = Balance(), 0.0
    for part, (candidate, others) in sorted(came.items()):
        share = parts[part].share
        balance.add((candidate, others), (share, 1.0 - share))
        expected += share * (candidate + others)
    return Dealt(
        candidate=sum(each[0] for each in came.values()),
        others=sum(each[1] for each in came.values()),
        expected=expected,
        odds=math.exp(min(balance.log_factor(), _MOST_ODDS)),
        turns=turns,
        whole=turns < MOST_TURNS,
    )
