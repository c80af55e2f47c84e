"""The output of `ostinato status --json`: the screen's facts for scripts. Times are Unix seconds, sizes are bytes, shares are 0 to 1."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ostinato.launch.placing.board import STALE_S
from ostinato.launch.views.overview import Overview, arm_rows
from ostinato.launch.views.releasing import releasing_json


def as_json(run: Overview) -> dict[str, Any]:
    """The run as JSON types. `up` is null before the first `ostinato up`; `up.alive` is false once it ended, was killed or hangs.

    `arms` are over the newest rated turns, as on the screen.
    """
    board, seen = run.board, run.summary
    return {
        "directory": run.directory,
        "url": run.url,
        "at": run.now,
        "up": board
        and {
            "alive": board.ended is None and run.now - board.at <= STALE_S,
            "pid": board.pid,
            "heard_at": board.at,
            "ended": board.ended,
        },
        "workers": [asdict(worker) for worker in board.workers] if board else [],
        "alarms": {name: {"reason": reason, "since": since} for name, (reason, since) in sorted(seen.alarms.items())},
        "arms": {row.arm: asdict(row.point) | {"newest_version": row.newest} for row in arm_rows(run)},
        "unproven_users": run.unproven or None,
        "steps": seen.step,
        "tokens": seen.tokens,
        "signals": seen.signals,
        "signals_by_name": dict(seen.names),
        "releases": [asdict(line) for line in seen.releases],
        **releasing_json(run.ledger, run.lines.get("release", ())),
        "refs": dict(run.refs),
        "lent": next((line for line in reversed(run.lines.get("serve", ())) if line["kind"] == "lent"), None),
        "turns": asdict(run.accounting) | {"balanced": run.accounting.balanced},
        "disk": {**run.disk, "free": run.free},
    }
