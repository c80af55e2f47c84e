"""Imitation of corrections: text that a person wrote in place of an answer is a demonstration, in addition to the answer's own credit.

Accepting and rejecting only reinforce what a model already says now and then. A correction says what it should have said: one supervised
term per corrected turn of a batch, the gradient of ``weight log pi(correction | the turn's prompt)``. Nobody sampled these tokens, so they
have no importance weight and no KL penalty.

Per token, a correction weighs `learn.corrections` times as much as the corrected answer with an advantage of 1. All its tokens
together never weigh more than that factor times the answer's, whatever its length. It is scaled down by the same factor as its author's
turns (`scales_of`). So a person's corrections never weigh more than that multiple of their corrected turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ostinato.core.pending_signals import order_of
from ostinato.core.records import Finish, Reward, Sampling, Signal, Span, Turn
from ostinato.core.samples import Sample
from ostinato.core.seams import Log
from ostinato.reward.credit import of_world

AnswerIds = Callable[[Turn, str], Sequence[int]]
"""(turn, text) -> the token ids of the text as the answer to the turn's prompt; none if it cannot replace the answer."""

# most tokens of a correction: MAX_LENGTH_RATIO times the answer's plus EXTRA_TOKENS; a longer text is no edit of the answer
MAX_LENGTH_RATIO, EXTRA_TOKENS = 2, 64


async def corrections_of(log: Log, turns: Sequence[Turn], rewards: Sequence[Reward]) -> dict[str, str]:
    """Return, by turn, the last correction among the signals of its reward. Redacted texts, and texts on worlds' turns, do not count."""
    said = await reward_signals(log, [turn for turn in turns if not of_world(turn)], rewards)
    return {each.turn: each.correction for each in said if each.correction}


async def reward_signals(log: Log, turns: Iterable[Turn], rewards: Iterable[Reward]) -> list[Signal]:
    """Return the signals that the rewards of these turns are based on, oldest first."""
    tenants = {turn.id: turn.tenant for turn in turns}
    wanted = [(tenants[reward.turn], id) for reward in rewards if reward.turn in tenants for id in reward.signals]
    said = await log.find(Signal, wanted) if wanted else []
    own = (each for each in said if tenants.get(each.turn) == each.tenant)
    return sorted(own, key=order_of)


def demonstration_weights(
    turns: Sequence[Turn], texts: Mapping[str, str], scales: Sequence[float], answer_ids: AnswerIds, weight: float
) -> tuple[float, ...]:
    """Return the weight of each turn's correction, per token; 0 for a turn without one. () if there are none at all.

    Args:
        turns: of a batch.
        texts: corrections by turn.
        scales: the scale factor of each turn's author.
        answer_ids: returns the tokens of a correction.
        weight: of a correction that is as long as its answer (`learn.corrections`).
    """
    found: list[float] = []
    for turn, scale in zip(turns, scales, strict=True):
        tokens, ids = len(turn.sampled_ids), _ids(turn, texts.get(turn.id), answer_ids)
        found.append(weight * scale * min(1.0, tokens / len(ids)) if ids else 0.0)
    return tuple(found) if any(found) else ()


def demonstrations(
    samples: Sequence[Sample], weights: Sequence[float], texts: Mapping[str, str], answer_ids: AnswerIds
) -> Iterator[Sample]:
    """Yield the corrections of a batch's samples, as samples to imitate, without those whose text has been erased."""
    for sample, weight in zip(samples, weights, strict=True):
        ids = _ids(sample.turn, texts.get(sample.turn.id), answer_ids) if weight else ()
        if not ids:
            continue
        turn = replace(
            sample.turn,
            id=f"{sample.turn.id}~correction",
            sampled_ids=tuple(ids),
            logprobs=(0.0,) * len(ids),
            spans=(Span(policy=sample.turn.spans[-1].policy, tokens=len(ids)),),
            sampling=Sampling(max_tokens=len(ids)),
            finish=Finish.STOP,
            text=texts[sample.turn.id],
            routes=b"",
            nucleus=b"",
            steered=None,
        )
        yield Sample(turn=turn, reward=sample.reward, advantages=(weight,) * len(ids), weight=sample.weight, shown=True)


def _ids(turn: Turn, text: str | None, answer_ids: AnswerIds) -> Sequence[int]:
    """Return the tokens of a correction; none if it is missing, equals the answer, or is too long to be an edit of it."""
    if text is None or not text.strip() or text.strip() == turn.text.strip() or not turn.sampled_ids:
        return ()
    ids = answer_ids(turn, text)
    return ids if len(ids) <= MAX_LENGTH_RATIO * len(turn.sampled_ids) + EXTRA_TOKENS else ()
