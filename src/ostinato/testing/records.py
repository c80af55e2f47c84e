"""Factories of complete, valid records: a test sets only the fields that matter to it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from ostinato.core.records import Arm, Delivered, Finish, PolicyVersion, Sampling, Signal, Source, Span, Turn
from ostinato.core.samples import Sample


def a_turn(
    id: str = "t:0",
    *,
    user: str = "ann",
    arm: Arm = Arm.LIVE,
    version: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] = (7, 9),
    finish: Finish = Finish.STOP,
    ended_at: float = 10.0,
    numerics: str = "",
    routes: bytes = b"",
    episode: str | None = None,
    parent: str | None = None,
    tenant: str = "default",
    propensity: float = 1.0,
    text: str | None = None,
    started_at: float | None = None,
    **fields: Any,
) -> Turn:
    """Make a turn that ended normally. `fields`: any other fields of `Turn`.

    Example: ``a_turn("a:0", user="bob", sampled=(4, 5, 6), propensity=0.5)``
    """
    spans, sampling = _spans_and_sampling(version, len(sampled))
    return Turn(
        id=id,
        episode=f"episode of {id}" if episode is None else episode,
        parent=parent,
        user=user,
        tenant=tenant,
        arm=arm,
        propensity=propensity,
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        logprobs=(-0.5,) * len(sampled),
        spans=spans,
        sampling=sampling,
        finish=finish,
        text="x" * len(sampled) if text is None else text,
        started_at=ended_at - 1.0 if started_at is None else started_at,
        ended_at=ended_at,
        numerics=numerics,
        routes=routes,
        **fields,
    )


@cache
def _spans_and_sampling(version: int, tokens: int) -> tuple[tuple[Span, ...], Sampling]:
    """Return the spans and the sampling of an answer. Cached, since simulations make millions of turns."""
    policy = PolicyVersion(number=version, hash=f"{version:064x}")
    return (Span(policy=policy, tokens=tokens),) if tokens else (), Sampling(max_tokens=max(1, tokens))


def a_signal(
    turn: Turn,
    name: str = "accepted",
    *,
    at: float = 11.0,
    id: str | None = None,
    value: float = 1.0,
    retracts: str | None = None,
) -> Signal:
    """Make a signal about the turn from its own tenant, received when it occurred.

    Example: ``a_signal(a_turn("a:0"), "undone", at=12.0)``
    """
    return Signal(
        id=f"{turn.id}/{name}/{at:g}" if id is None else id,
        tenant=turn.tenant,
        turn=turn.id,
        name=name,
        value=value,
        source=Source.HUMAN,
        occurred_at=at,
        received_at=at,
        retracts=retracts,
    )


def a_delivery(*turns: Turn, at: float = 10.5) -> Delivered:
    """Make the record that these turns' answers were delivered.

    Example: ``a_delivery(a_turn("a:0"), a_turn("b:0"))``
    """
    return Delivered(id="/".join(turn.id for turn in turns), turns=tuple(turn.id for turn in turns), at=at)


def a_sample(turn: Turn, advantage: float, *, reward: float = 0.0, weight: float = 1.0) -> Sample:
    """Make a sample: a turn with the same advantage for all of its tokens.

    Example: ``a_sample(a_turn(), -0.7)``
    """
    return Sample(turn=turn, reward=reward, advantages=(advantage,) * len(turn.sampled_ids), weight=weight)
