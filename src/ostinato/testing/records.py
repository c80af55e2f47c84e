"""Records for tests: whole and valid, with only what matters spelled out."""

from __future__ import annotations

from collections.abc import Sequence

from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Span, Turn
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
) -> Turn:
    """A turn that ended normally.

    Example: ``a_turn("a:0", user="bob", sampled=(4, 5, 6))``
    """
    policy = PolicyVersion(number=version, hash=f"{version:064x}")
    return Turn(
        id=id,
        episode=f"episode of {id}",
        parent=None,
        user=user,
        tenant="default",
        arm=arm,
        propensity=1.0,
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(sampled),
        logprobs=tuple(-0.5 for _ in sampled),
        spans=(Span(policy=policy, tokens=len(sampled)),) if sampled else (),
        sampling=Sampling(max_tokens=max(1, len(sampled))),
        finish=finish,
        text="x" * len(sampled),
        started_at=ended_at - 1.0,
        ended_at=ended_at,
        numerics=numerics,
        routes=routes,
    )


def a_sample(turn: Turn, advantage: float, *, reward: float = 0.0, weight: float = 1.0) -> Sample:
    """A turn with one advantage for all of its tokens.

    Example: ``a_sample(a_turn(), -0.7)``
    """
    return Sample(turn=turn, reward=reward, advantages=(advantage,) * len(turn.sampled_ids), weight=weight)
