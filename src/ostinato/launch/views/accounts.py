"""Lines for people: where every turn stands, what became of feedback, and how much feedback is usual."""

from __future__ import annotations

from collections.abc import Mapping

from ostinato.reward.accounting import Accounting


def accounts(found: Accounting, now: float) -> list[str]:
    """One line on the turns, one on their rewards, one on feedback that changed nothing, one per tenant on how much feedback is usual."""
    state = "balanced" if found.balanced else "NOT BALANCED"
    held = sum(found.held.values())
    wait = "" if found.oldest_wait is None else f", the longest for {max(0.0, now - found.oldest_wait):.0f} s"
    lines = [
        f"{found.ingested} turns = {found.trained} trained + {held} held back ({_counts(found.held)}) + "
        f"{found.waiting} waiting{wait}: {state}",
        f"{found.rewarded} rewards; {sum(found.quarantined.values())} turns without a reward ({_counts(found.quarantined)})",
        f"feedback without effect: {found.late} late, {found.retracted} retracted after training, {found.foreign} about "
        f"another tenant's turns, {found.moot} about turns without a reward, {found.excess} over the limit, {found.forgotten} about "
        f"unknown turns ({found.orphans} still waiting for theirs)",
    ]
    lines += [
        f"usual feedback of {tenant}: on {100 * each.usual:.0f}% of turns ({each.turns} turns){', SILENT NOW' if each.alarm else ''}"
        for tenant, each in sorted(found.coverage.items())
    ]
    return lines


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counted.items()) or "none"
