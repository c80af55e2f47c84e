"""Self-distillation from hints: feedback on an answer, added to its prompt, makes a teacher of the same weights.

An outcome says that a session failed; feedback on one of its turns often says what was wrong there. The teacher is the current model with
that feedback in the turn's prompt; the student is the same model without it. At each token of that answer, the student's distribution
is drawn towards the teacher's by KL(teacher || student) over the whole vocabulary. No other turn enters this term.

A hint is a person's comment on a rejection, or the continuation of the conversation after an answer about which a signal says that its call
failed or that its reader was dissatisfied. It is taken only from rows of the batch itself, so that consent, erasure and holdbacks
apply to it as to any turn, and never from simulated worlds, whose graders know what the model must not.

A teacher that was told an answer leaks it, so a hint alone does not decide what is bad. The outcome gives the direction: only a turn
with a negative advantage gets a hint. And the trainer restricts the term to tokens that the teacher, too, finds less likely than the
student. At each position this multiplies the expected gradient by the student's probability of such tokens, at most 1, and does not change
its direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ostinato.core.errors import Corrupt
from ostinato.core.records import Advantages, Purpose, Reward, Signal, Turn, TurnHint
from ostinato.core.samples import Sample
from ostinato.core.seams import Log
from ostinato.reward.config import RewardConfig
from ostinato.reward.credit import of_world
from ostinato.reward.demonstrations import reward_signals

FRAME = "\n\n[What was said about an earlier answer to this: {}]"
"""How a hint is written at the end of the last message before the answer."""


class HintTokens(Protocol):
    """What hints need from a model's tokenizer and chat template."""

    def hinted_ids(self, turn: Turn, note: str) -> Sequence[int]:
        """Return the turn's prompt with the note at the end of its last message; () if it cannot be added there."""
        ...

    def said_between(self, turn: Turn, following: Turn) -> str:
        """Return what others said between a turn and one whose prompt continues it; "" if that cannot be determined."""
        ...


class HintSource:
    """Finds the hints of a batch, and makes samples of the hints in its row.

    Args:
        log: contains the turns' rewards, and the signals that these are based on.
        config: `hints` says which signals count.
        tokens: for the model that learns.

    Example::

        hints = await source.hints(turns, credits, scales)  # into the batch's row
        samples = [*samples, *await source.samples(samples, hints)]
    """

    def __init__(self, log: Log, config: RewardConfig, tokens: HintTokens) -> None:
        self._log, self._config, self._tokens = log, config.hints, tokens
        self._token_budget = config.batch_tokens

    async def hints(
        self, turns: Sequence[Turn], credits: Mapping[str, Advantages], scales: Mapping[str, float]
    ) -> tuple[TurnHint, ...]:
        """Return the hints for those of a batch's turns whose advantages are negative, in the order of the turns. If not all fit into
        another `reward.batch_tokens`, those of the turns with the worst advantages are kept.

        Args:
            turns: of the batch.
            credits: their advantages.
            scales: by turn, the scale factor of its person: nobody teaches more by comments than by their turns.
        """
        means = {turn.id: math.fsum(credits[turn.id]) / max(1, len(turn.sampled_ids)) for turn in turns}
        worse = [turn for turn in turns if means[turn.id] < 0 and not of_world(turn)]
        if not self._config.weight or not worse:
            return ()
        signals = await self._signals(worse)
        # a request for a summary of the conversation is nobody's feedback
        said = (turn for turn in reversed(turns) if turn.purpose in (Purpose.TASK, Purpose.SUBAGENT))
        following = {turn.parent: turn for turn in said if turn.parent is not None}
        possible = [
            hint
            for turn in sorted(worse, key=lambda turn: means[turn.id])
            if (hint := self._hint(turn, signals.get(turn.id, ()), following.get(turn.id), scales[turn.id]))
        ]
        by_id = {turn.id: turn for turn in turns}
        texts = await self._texts(possible, by_id)
        found, left = set[str](), self._token_budget
        for hint in possible:
            turn = by_id[hint.turn]
            prompt = self._tokens.hinted_ids(turn, texts[turn.id]) if turn.id in texts else ()
            size = len(prompt) + len(turn.sampled_ids)
            if prompt and size <= left:
                found.add(turn.id)
                left -= size
        chosen = {hint.turn: hint for hint in possible if hint.turn in found}
        return tuple(chosen[turn.id] for turn in turns if turn.id in chosen)

    async def samples(self, samples: Sequence[Sample], hints: Sequence[TurnHint]) -> list[Sample]:
        """Return a row's hints as samples, without those whose text has been erased. Raises Corrupt for a turn that is not in the batch."""
        known = {sample.turn.id: sample for sample in samples}
        if missing := [hint.turn for hint in hints if hint.turn not in known]:
            raise Corrupt(f"a hint names turn {missing[0]}, which is not in its batch; restore the log")
        texts = await self._texts(hints, {id: sample.turn for id, sample in known.items()})
        return [
            replace(known[hint.turn], advantages=(hint.weight,) * len(ids), hinted=tuple(prompt))
            for hint in hints
            if (ids := known[hint.turn].turn.sampled_ids)
            and hint.turn in texts
            and (prompt := self._tokens.hinted_ids(known[hint.turn].turn, texts[hint.turn]))
        ]

    async def _signals(self, turns: Sequence[Turn]) -> dict[str, list[Signal]]:
        """Return the signals that the turns' rewards are based on, by turn, oldest first."""
        rewards = await self._log.find(Reward, [(turn.id,) for turn in turns])
        found: dict[str, list[Signal]] = {}
        for signal in await reward_signals(self._log, turns, rewards):
            if signal.value > 0:
                found.setdefault(signal.turn, []).append(signal)
        return found

    def _hint(self, turn: Turn, signals: Sequence[Signal], following: Turn | None, scale: float) -> TurnHint | None:
        """Return a turn's hint: the last comment on it, otherwise what followed it."""
        weight, names = self._config.weight * scale, self._config.comments
        told = [each for each in signals if each.name in names and each.comment and each.comment.strip()]
        if told:
            return TurnHint(turn=turn.id, weight=weight, signal=told[-1].id)
        failed = any(each.name in self._config.follow_ups for each in signals)
        if not failed or following is None or following.tenant != turn.tenant:
            return None
        return TurnHint(turn=turn.id, weight=weight, following=following.id)

    async def _texts(self, hints: Sequence[TurnHint], turns: Mapping[str, Turn]) -> dict[str, str]:
        """Return each hint's text in its frame, by turn, if the text still exists."""
        asked = [(turns[hint.turn].tenant, hint.signal) for hint in hints if hint.signal]
        signals = await self._log.find(Signal, asked) if asked else []
        found = {each.turn: each.comment or "" for each in signals}
        for hint in hints:
            turn, following = turns[hint.turn], turns.get(hint.following)
            if following is not None and not (turn.redacted or following.redacted):
                found[hint.turn] = self._tokens.said_between(turn, following)
        return {
            turn: FRAME.format(_cut(text.strip(), self._config.chars)) for turn, text in found.items() if text.strip()
        }


def _cut(text: str, chars: int) -> str:
    """Return at most about `chars` characters: the beginning and the end of a longer text."""
    if len(text) <= chars:
        return text
    half = chars // 2
    return f"{text[:half]} \u2026 {text[-half:]}"
