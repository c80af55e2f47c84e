"""Imitation learning: trains all weights on demonstrations, with the same trainer that later learns from rewards.

Data flow: demonstrations (conversations in which somebody did it right) -> each assistant message as a turn that the model might have
sampled -> one optimizer step per batch, with an advantage of 1 for every token and the current log-probabilities as the sampler's. The
importance weights are then 1, and the policy gradient is that of the log-likelihood.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ostinato.core.conversation import Conversation, Role
from ostinato.core.errors import BadRequest
from ostinato.core.records import Arm, Finish, PolicyVersion, Sampling, Span, Turn
from ostinato.core.samples import Sample
from ostinato.core.weights import Learned
from ostinato.model.renderer import HFRenderer
from ostinato.train.trainer import PolicyTrainer


def shown_turns(demonstration: Conversation, renderer: HFRenderer) -> tuple[Turn, ...]:
    """Return the assistant's messages of one demonstration as turns of one episode, without log-probabilities.

    Raises BadRequest if there is none, or one cannot be rendered.
    """
    places = [place for place, message in enumerate(demonstration.messages) if message.role is Role.ASSISTANT]
    if not places:
        raise BadRequest("a demonstration needs a message of the assistant", field="messages")
    told = repr(demonstration).encode("utf-8", "surrogatepass")
    episode = hashlib.blake2b(told, digest_size=8).hexdigest()
    turns: list[Turn] = []
    for number, place in enumerate(places):
        prompt, answer = renderer.said(replace(demonstration, messages=demonstration.messages[: place + 1]))
        turns.append(_turn(f"{episode}-{number}:0", episode, prompt, answer))
    return tuple(turns)


def imitate(
    trainer: PolicyTrainer, shown: Sequence[tuple[Turn, ...]], *, epochs: int, batch: int, seed: int
) -> Iterator[Learned]:
    """Take optimizer steps of `batch` demonstrations each; each epoch goes through all demonstrations once, in its own random order.

    A demonstration has weight 1 however many messages it has. Raises NoSignal and BadWeights like `PolicyTrainer.step`.
    """
    for epoch in range(epochs):
        order = list(shown)
        random.Random(f"{seed} {epoch}").shuffle(order)
        for first in range(0, len(order), batch):
            yield _step(trainer, order[first : first + batch])


def _step(trainer: PolicyTrainer, shown: Sequence[tuple[Turn, ...]]) -> Learned:
    turns = [turn for episode in shown for turn in episode]
    weights = [1.0 / len(episode) for episode in shown for _ in episode]
    numerics = "" if trainer.contract is None else trainer.contract.id
    held = PolicyVersion(number=trainer.step_count, hash="")
    samples = [
        Sample(
            turn=replace(turn, logprobs=logprobs, spans=(Span(policy=held, tokens=len(logprobs)),), numerics=numerics),
            reward=1.0,
            advantages=(1.0,) * len(logprobs),
            weight=weight,
            summed=True,
        )
        for turn, logprobs, weight in zip(turns, trainer.score(turns), weights, strict=True)
    ]
    return trainer.step(samples)


def _turn(name: str, episode: str, prompt: Sequence[int], answer: Sequence[int]) -> Turn:
    return Turn(
        id=name,
        episode=episode,
        parent=None,
        user="demonstration",
        tenant="default",
        arm=Arm.WORLD,
        propensity=1.0,
        prompt_ids=tuple(prompt),
        sampled_ids=tuple(answer),
        logprobs=(0.0,) * len(answer),
        spans=(Span(policy=PolicyVersion(number=0, hash=""), tokens=len(answer)),),
        sampling=Sampling(max_tokens=len(answer)),
        finish=Finish.STOP,
        text="",
        started_at=0.0,
        ended_at=0.0,
    )
