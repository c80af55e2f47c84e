"""Idempotency keys: a repeated call gets the answer of the first, also after a restart.

The call's id is derived from tenant, key and body, so the turns of an earlier try can be found in the log by their ids. After a try
that left no complete answer (the client went away, the engine failed, the process was killed between two choices), the next try gets
the next number.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from ostinato.core.errors import BadRequest, Conflict
from ostinato.core.records import Arm, Turn
from ostinato.core.seams import Log
from ostinato.serve.dialects.openai_reply import json_bytes

_MOST_TRIES = 64
_NAME_CHARS = 24  # fewer than an id without a key has


class KeyReused(BadRequest):
    """An idempotency key was reused with a different body."""

    status = 422
    code = "idempotency_key_reused"


@dataclass(slots=True, kw_only=True)
class Try:
    """One try at a call: its id, the turns of an earlier try that answered it (if any), and the writes that it has begun."""

    base: str
    number: int = 0
    turns: list[Turn] = field(default_factory=list[Turn])
    writes: list[asyncio.Future[Any]] = field(default_factory=list[asyncio.Future[Any]])

    @property
    def id(self) -> str:
        """The prefix of its turns' ids."""
        return f"{self.base}-{self.number}" if self.number else self.base

    def again(self) -> None:
        """Go on under the next id, because the turns under this id record a failure."""
        self.number += 1


class IdempotencyKeys:
    """Serialises calls with the same key and finds the answers of earlier ones.

    Args:
        log: holds the earlier answers.
        remembered: how many of a tenant's keys are remembered with their bodies.

    Example::

        async with repeats.attempt("chatcmpl", tenant, key, body_digest("chatcmpl", body), n=1) as attempt:
            attempt.turns  # the answer, if there was one; else sample under attempt.id
    """

    def __init__(self, log: Log, *, remembered: int) -> None:
        self._log = log
        self._remembered = remembered
        # by tenant: digest of tenant and key -> digest of the body
        self._bodies: defaultdict[str, OrderedDict[str, str]] = defaultdict(OrderedDict)
        self._open: dict[str, asyncio.Future[None]] = {}

    @asynccontextmanager
    async def attempt(self, kind: str, tenant: str, key: str, shape: str, n: int) -> AsyncGenerator[Try]:
        """Wait for other calls under the same key, then look for their answer. `shape`: a digest of the body (`body_digest`).
        Raises KeyReused, Conflict.
        """
        name = _digest(_NAME_CHARS, tenant.encode(), key.encode())
        bodies = self._bodies[tenant]
        if bodies.setdefault(name, shape) != shape:
            raise KeyReused(
                "This Idempotency-Key came before with another body; make a new key for each new call.",
                field="Idempotency-Key",
            )
        bodies.move_to_end(name)
        while name in self._open:
            await asyncio.shield(self._open[name])
        ended = self._open[name] = asyncio.get_running_loop().create_future()
        attempt = Try(base=f"{kind}-{name}-{shape}")
        try:
            attempt.turns = await self._find(attempt, n)
            yield attempt
        finally:
            # the try left nothing, so the key may be used with another body
            if not attempt.turns and not attempt.writes:
                bodies.pop(name, None)
            self._release(name, ended, [write for write in attempt.writes if not write.done()])
            while len(bodies) > self._remembered:
                bodies.popitem(last=False)

    def restore(self, turn: Turn) -> None:
        """Remember the key of a call that was read from the log."""
        parts = turn.id.partition(":")[0].split("-")
        if len(parts) >= 3 and len(parts[1]) == _NAME_CHARS and self._remembered:
            bodies = self._bodies[turn.tenant]
            bodies[parts[1]] = parts[2]
            if len(bodies) > self._remembered:
                bodies.popitem(last=False)

    async def _find(self, attempt: Try, n: int) -> list[Turn]:
        """Advance `attempt` to the try that was answered and return its turns, or to the first number without turns and return []."""
        for _ in range(_MOST_TRIES):
            turns = await self._log.find(Turn, [(f"{attempt.id}:{index}",) for index in range(n)])
            if not turns or (len(turns) == n and all(_whole(turn) for turn in turns)):
                return turns
            attempt.again()
        raise Conflict(f"{_MOST_TRIES} tries under this Idempotency-Key ended without an answer; make a new key.")

    def _release(self, name: str, ended: asyncio.Future[None], writes: list[asyncio.Future[Any]]) -> None:
        """Let the next call in, once none of this try's writes can still reach the log."""
        if writes:
            writes[0].add_done_callback(lambda _: self._release(name, ended, [w for w in writes if not w.done()]))
            return
        del self._open[name]
        if not ended.done():
            ended.set_result(None)


def _whole(turn: Turn) -> bool:
    """True if the turn is a complete answer that can be replayed."""
    return turn.finish.trainable and (bool(turn.spans) or turn.arm is Arm.OUTSIDE)


def body_digest(kind: str, body: Any) -> str:
    """A digest of a call's kind and body. Pure."""
    return _digest(12, kind.encode(), _canonical(body))


def _canonical(body: Any) -> bytes:
    """The body as JSON with its top-level fields sorted. The streaming options are left out: they do not change the question."""
    plain = {name: body[name] for name in sorted(body) if name not in ("stream", "stream_options")}
    return json_bytes(plain)


def _digest(length: int, *parts: bytes) -> str:
    state = blake2b(digest_size=length // 2)
    for part in parts:
        state.update(len(part).to_bytes(8, "big") + part)
    return state.hexdigest()
