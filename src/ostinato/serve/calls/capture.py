"""From chunks to turns: collects the samples of one request, choice by choice, and writes each to the log exactly once.

A choice's turn is durable before its end is sent to the client. A choice that is still open when the client leaves or the engine fails is
written, too, with a finish that keeps it out of training.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ostinato.core import nucleus
from ostinato.core.errors import GrammarTooComplex, OstinatoError, Unavailable
from ostinato.core.generation import Chunk, Generate, Tops, Usage
from ostinato.core.records import (
    Arm,
    Branch,
    Consent,
    Finish,
    Pick,
    PolicyVersion,
    Purpose,
    Sampling,
    Span,
    Turn,
    Window,
)
from ostinato.core.steering import Steered, Steering
from ostinato.serve.calls.conversations import AnswerParser
from ostinato.serve.config import AutoArm
from ostinato.serve.parts import Parts

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Everything known about a model call before its first token.

    Example: ``Call(id="chatcmpl-3f", episode="e1", parent=None, user="u42", tenant="default", arm=Arm.LIVE, propensity=0.8,
    slot="live", prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=64), n=1, started_at=10.0)``
    """

    id: str
    episode: str
    parent: str | None
    user: str
    tenant: str
    arm: Arm
    propensity: float
    slot: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    n: int
    started_at: float
    numerics: str = ""
    group: str | None = None
    harness: str = ""
    verified: bool = False
    auto: Pick | None = None
    auto_arm: AutoArm | None = None  # the arm that Auto drew, for the call's cost
    overridden: str = ""  # the sampling parameters that the operator overrode, as a header's value
    tops: int = 0
    purpose: Purpose = Purpose.TASK
    branch: Branch = Branch.NONE
    window: Window | None = None
    until: float | None = None  # deadline for the end of sampling, by `time.monotonic`
    steering: Steering | None = None  # the person's dials
    style: Pick | None = None  # the style of the conversation, and the odds of its draw
    consent: Consent = Consent.YES
    form: str = ""  # the request's fields that constrain the answer's format, for errors
    secret: bool = False  # its prompt holds secrets, which keeps it from training
    finds: Callable[[str], bool] | None = None  # returns True if an answer holds secrets
    packed_prompt: bytes = field(default=b"", repr=False)  # the prompt's ids in the log's format, if available

    def request(self) -> Generate:
        """Return the request to the engine. Raises DeadlinePassed."""
        within_s = None if self.until is None else self.until - time.monotonic()
        if within_s is not None and within_s <= 0:
            raise DeadlinePassed
        return Generate(
            id=self.id,
            slot=self.slot,
            prompt_ids=self.prompt_ids,
            sampling=self.sampling,
            n=self.n,
            cache_salt=cache_salt(self.tenant, self.user, self.arm),
            tops=self.tops,
            within_s=within_s,
            paired=self.arm is Arm.EVAL,
            steering=self.steering,
        )

    def turn_ids(self) -> list[str]:
        """Return the turn id of each choice."""
        return [f"{self.id}:{index}" for index in range(self.n)]


def cache_salt(tenant: str, user: str, arm: Arm) -> str:
    """Return the salt within which calls share the prefix cache: one per tenant, and for rollouts one per worker, so that workers on other
    machines cannot learn from an answer's speed what other rollouts asked.
    """
    return f"{tenant}/{user}" if arm is Arm.WORLD else tenant


class StoreSlow(Unavailable):
    """The log did not confirm a turn in time: the turn may or may not be written, and counts as not delivered."""

    code = "store_slow"


class DeadlinePassed(Unavailable):
    """A call's deadline passed before a token was sampled: nothing was served, and there is no turn."""

    status = 504
    code = "deadline_passed"

    def __init__(self) -> None:
        super().__init__(
            "The call's time limit passed before its first token; allow it more time, or ask for less at once."
        )


class EngineFailed(OstinatoError):
    """The engine failed to complete a sample."""

    status = 500
    code = "engine_error"


@dataclass(slots=True)
class Choice:
    """One choice's sample so far. `reading` parses it for the client; None if nothing does."""

    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[Span] = field(default_factory=list[Span])
    text: list[str] = field(default_factory=list[str])
    finish: Finish | None = None
    seed: int | None = None
    routes: bytes = b""
    nucleus: bytearray | None = field(default_factory=bytearray)
    steered: Steered | None = None
    usage: Usage | None = None
    tops: list[Tops] = field(default_factory=list[Tops])  # sent to the client, not stored
    reading: AnswerParser | None = None
    written: bool = False

    def keep_nucleus(self, more: bytes) -> None:
        """Add the nucleus sets of the next tokens; drop all of the turn's sets once they exceed what a turn may store."""
        if self.nucleus is not None:
            self.nucleus += more
            if len(self.nucleus) > nucleus.MAX_BYTES:
                self.nucleus = None


class Capture:
    """Collects the chunks of one call and writes its turns.

    Args:
        call: the call.
        parts: the gateway's, of which the log, its writes, the clock and the metrics are used.
        noted: called with each turn that is in the log.
        stored: True to replay turns from the log, so that nothing is written.
    """

    def __init__(self, call: Call, parts: Parts, noted: Callable[[Turn], None], *, stored: bool = False) -> None:
        self.call = call
        self.stored = stored
        self.choices = [Choice(written=stored) for _ in range(call.n)]
        self.begun: list[asyncio.Task[Any]] = []  # pending writes, which may outlast the call
        self._open = call.n
        self._unseen = 0  # tokens sampled after the gateway ended their choice
        self._parts, self._noted = parts, noted

    def take(self, chunk: Chunk) -> None:
        """Add a chunk to its choice.

        Raises:
            EngineFailed: the chunk cannot belong to this call or reports a failure of the engine.
            DeadlinePassed: the deadline passed before any token was sampled.
            GrammarTooComplex: the format cannot be enforced to the end.
        """
        if not 0 <= chunk.index < len(self.choices) or len(chunk.ids) != len(chunk.logprobs):
            raise EngineFailed("The engine sent a chunk that does not fit the request; report this as a fault.")
        if not all(map(math.isfinite, chunk.logprobs)):
            raise EngineFailed(f"The weights {chunk.policy} gave a log-probability that is not a number; roll back.")
        choice = self.choices[chunk.index]
        if choice.finish is not None:
            raise EngineFailed("The engine sent tokens after the end of a sample; report this as a fault.")
        choice.ids += chunk.ids
        choice.logprobs += chunk.logprobs
        choice.tops += chunk.tops
        choice.keep_nucleus(chunk.nucleus)
        choice.text.append(chunk.text)
        choice.steered = chunk.steered
        if chunk.policy is not None:
            choice.seed = chunk.seed
            _extend(choice.spans, chunk.policy, len(chunk.ids))
        if chunk.finish is None:
            return
        choice.finish, choice.routes, choice.usage = chunk.finish, chunk.routes, chunk.usage
        self._open -= 1
        if chunk.finish is Finish.DEADLINE and not self.tokens:
            raise DeadlinePassed
        if chunk.finish is Finish.GRAMMAR:
            raise GrammarTooComplex(self.call.form)
        if not chunk.finish.complete:
            raise EngineFailed(f"The engine ended the answer early ({chunk.finish}); send the request again.")

    def drop(self, chunk: Chunk) -> None:
        """Count a chunk of a choice that the gateway has ended (`end`). Its tokens are discarded, but they were sampled for this call."""
        self._unseen += len(chunk.ids)

    def called(self, index: int) -> None:
        """Mark a choice as ended by tool calls."""
        if self.choices[index].finish is Finish.STOP:
            self.choices[index].finish = Finish.TOOL_CALLS

    def end(self, index: int) -> bool:
        """End a choice at the tokens taken so far, because it has made the one allowed call. Do not `take` its later chunks.

        Returns False if the engine has already ended it.
        """
        if self.choices[index].finish is not None:
            return False
        self.choices[index].finish = Finish.TOOL_CALLS
        self._open -= 1
        return True

    @property
    def complete(self) -> bool:
        """True if every choice has ended."""
        return self._open == 0

    @property
    def tokens(self) -> int:
        """The number of tokens sampled in all choices, or counted by an outside model."""
        return round(sum(choice.usage.answer if choice.usage else len(choice.ids) for choice in self.choices))

    @property
    def charged_tokens(self) -> int:
        """The number of tokens that count against the tenant's quota: `tokens`, and those sampled after the gateway ended their choice."""
        return self.tokens + self._unseen

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the prompt, as counted by the model that answered."""
        usage = self.choices[0].usage
        return len(self.call.prompt_ids) if usage is None else usage.prompt

    async def store(self, *indices: int) -> list[Turn]:
        """Write the turns of ended choices, skipping those in the log; return the ones written. They are durable on return.

        Raises StorageFull.
        """
        fresh = [i for i in indices if not self.choices[i].written]
        turns = [self._turn(i, self.choices[i].finish or Finish.ERROR) for i in fresh]
        await self._write(fresh, turns)
        return turns

    async def close(self, finish: Finish, timeout_s: float) -> None:
        """Write all turns not written yet: ended choices keep their finish, the others get `finish`.

        Never raises for a full or slow disk: the client has left or already got an error, so the loss is only logged and counted.
        """
        indices = [i for i, choice in enumerate(self.choices) if not choice.written]
        turns = [self._turn(i, self.choices[i].finish or finish) for i in indices]
        try:
            async with asyncio.timeout(timeout_s):
                await self._write(indices, turns)
        except (OstinatoError, TimeoutError) as error:
            _LOG.error("Turns of %s were not stored: %s", self.call.id, error or "the log did not answer in time")

    def _turn(self, index: int, finish: Finish) -> Turn:
        call, choice = self.call, self.choices[index]
        text = "".join(choice.text)
        sampling = call.sampling if choice.seed is None else replace(call.sampling, seed=choice.seed)
        turn = Turn(
            id=f"{call.id}:{index}",
            episode=call.episode,
            parent=call.parent,
            user=call.user,
            tenant=call.tenant,
            arm=call.arm,
            propensity=call.propensity,
            prompt_ids=call.prompt_ids,
            sampled_ids=tuple(choice.ids),
            logprobs=tuple(choice.logprobs),
            spans=tuple(choice.spans),
            sampling=sampling,
            finish=finish,
            text=text,
            started_at=call.started_at,
            ended_at=self._parts.clock(),
            numerics=call.numerics,
            routes=choice.routes,
            nucleus=bytes(choice.nucleus or b""),
            group=call.group,
            harness=call.harness,
            verified=call.verified,
            auto=None if call.auto is None else replace(call.auto, cost=self._cost(choice)),
            purpose=call.purpose,
            branch=call.branch,
            window=call.window,
            calls=() if choice.reading is None else choice.reading.parsed_calls(),
            steered=choice.steered,
            style=call.style,
            consent=call.consent,
            secret=call.secret or (call.finds is not None and call.finds(text)),
        )
        if not turn.counts:
            return turn.without_words()
        if call.packed_prompt:
            turn.keep_packed_prompt(call.packed_prompt)
        return turn

    def _cost(self, choice: Choice) -> float | None:
        """The cost of one choice with its share of the prompt; None if Auto did not draw an arm, or an outside model reported no usage."""
        call = self.call
        if call.auto_arm is None or (call.arm is Arm.OUTSIDE and choice.usage is None):
            return None
        usage = choice.usage or Usage(prompt=len(call.prompt_ids), answer=len(choice.ids))
        return call.auto_arm.cost(usage.prompt / call.n, usage.answer)

    async def _write(self, indices: Sequence[int], turns: list[Turn]) -> None:
        if not turns:
            return
        for i in indices:
            self.choices[i].written = True  # before the write, so that a turn in flight is not written twice
        task = self._parts.writes.begin(self._append(turns))
        self.begun.append(task)
        await asyncio.shield(task)

    async def _append(self, turns: list[Turn]) -> None:
        try:
            await self._parts.log.append(*turns)
        except OstinatoError:
            self._parts.metrics.store_error()
            raise
        for turn in turns:
            self._parts.metrics.turn(turn)
            self._noted(turn)


def stop_string(sampled: str, shown: str, stops: Sequence[str]) -> str:
    """Return the stop string that ended an answer: the shortest that follows the shown part of the sampled text; "" if none does.

    Example: ``stop_string("one END two", "one ", ("END", "two")) == "END"``
    """
    if not sampled.startswith(shown):
        return ""
    rest = sampled[len(shown) :]
    return min((stop for stop in stops if rest.startswith(stop)), key=len, default="")


def call_of_turns(turns: Sequence[Turn]) -> Call:
    """Return the call that these turns answered."""
    first = turns[0]
    return Call(
        id=first.id.rpartition(":")[0],
        episode=first.episode,
        parent=first.parent,
        user=first.user,
        tenant=first.tenant,
        arm=first.arm,
        propensity=first.propensity,
        slot=str(first.arm),
        prompt_ids=first.prompt_ids,
        sampling=first.sampling,
        n=len(turns),
        started_at=first.started_at,
        numerics=first.numerics,
        group=first.group,
        harness=first.harness,
        verified=first.verified,
        auto=first.auto,
        style=first.style,
        purpose=first.purpose,
        branch=first.branch,
        window=first.window,
        consent=first.consent,
    )


async def replay(turns: Sequence[Turn]) -> AsyncGenerator[Chunk]:
    """Replay stored turns as the chunks that an engine would send: one per span, all text in the first."""
    for index, turn in enumerate(turns):
        start, text = 0, turn.text
        if not turn.spans:  # from an outside model
            yield Chunk(index=index, ids=(), logprobs=(), policy=None, text=text, finish=turn.finish)
        for number, span in enumerate(turn.spans, 1):
            end, last = start + span.tokens, number == len(turn.spans)
            yield Chunk(
                index=index,
                ids=turn.sampled_ids[start:end],
                logprobs=turn.logprobs[start:end],
                policy=span.policy,
                text=text,
                finish=turn.finish if last else None,
                seed=turn.sampling.seed or 0,
                routes=turn.routes if last else b"",
            )
            start, text = end, ""


def _extend(spans: list[Span], policy: PolicyVersion, tokens: int) -> None:
    if not tokens:
        return
    if spans and spans[-1].policy == policy:
        spans[-1] = Span(policy=policy, tokens=spans[-1].tokens + tokens)
    else:
        spans.append(Span(policy=policy, tokens=tokens))
