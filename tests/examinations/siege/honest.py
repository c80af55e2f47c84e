"""The honest tenant: a few clients that ask, rate and look at a page, each at its own pace, and how long everything took them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CLIENTS = 3
PAUSE_S = 0.4
PAGE_EVERY = 5  # rounds
PROBE_S = 0.1
WORDS = ("the", "a song", "tell me more", "go on then", "what is it")


@dataclass
class Felt:
    """Seconds of each of the tenant's requests by kind, failures by kind and reason, and the waits of a probe of /health."""

    took: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    failed: Counter[str] = field(default_factory=Counter)

    def note(self, kind: str, began: float) -> None:
        self.took.setdefault(kind, []).append(time.perf_counter() - began)

    @property
    def calls(self) -> list[float]:
        return [*self.took.get("call", []), *self.took.get("stream", [])]

    def figures(self) -> dict[str, Any]:
        """Counts, and milliseconds by kind."""
        kinds = {"calls": self.calls, **self.took}
        return {"failures": dict(self.failed)} | {kind: spread(times) for kind, times in kinds.items()}


def spread(times: Sequence[float]) -> dict[str, float]:
    """Count, median, 99th percentile and maximum, in milliseconds."""
    ordered = sorted(times)
    marks = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    found = {name: round(1e3 * ordered[min(len(ordered) - 1, int(len(ordered) * at))], 1) for name, at in marks.items()}
    return {"count": len(ordered), **found}


class Honest:
    """One honest client. Everything that it asks must succeed."""

    def __init__(self, session: aiohttp.ClientSession, felt: Felt, number: int) -> None:
        self._session, self._felt, self._number = session, felt, number

    async def live(self) -> None:
        """Ask, rate and look until cancelled."""
        await asyncio.sleep(self._number * PAUSE_S / CLIENTS)
        rounds = 0
        while True:
            rounds += 1
            turn = await self._tried("stream" if rounds % 2 else "call", self._ask, rounds)
            if turn:
                await self._tried("feedback", self._rate, turn)
                if rounds % PAGE_EVERY == 0:
                    await self._tried("page", self._look, turn)
            await asyncio.sleep(PAUSE_S)

    async def _tried(self, kind: str, ask: Any, about: Any) -> str:
        began = time.perf_counter()
        try:
            turn = await ask(about)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._felt.failed[f"{kind}: {type(error).__name__} {error}"[:200]] += 1
            return ""
        self._felt.note(kind, began)
        return turn

    async def _ask(self, rounds: int) -> str:
        messages = [{"role": "user", "content": WORDS[rounds % len(WORDS)]}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 4, "user": f"user-{self._number}"}
        stream = bool(rounds % 2)
        async with self._session.post("/v1/chat/completions", json=body | {"stream": stream}) as response:
            said = await response.read()
            if response.status != 200 or (stream and b"data: [DONE]" not in said):
                raise ValueError(f"{response.status} {said[-150:]!r}")
            return response.headers["x-ostinato-turn"].split(",")[0]

    async def _rate(self, turn: str) -> str:
        event = {"target": turn, "name": "accepted", "value": True, "source": "human"}
        async with self._session.post("/v1/feedback", json=event) as response:
            said = await response.read()
            if response.status != 202 or b"accepted" not in said:
                raise ValueError(f"{response.status} {said[:150]!r}")
        return turn

    async def _look(self, turn: str) -> str:
        async with self._session.get(f"/turns/{turn}") as response:
            said = await response.read()
            if response.status != 200 or turn.encode() not in said:
                raise ValueError(f"{response.status} {said[:150]!r}")
        return turn


async def probe(session: aiohttp.ClientSession, felt: Felt) -> None:
    """Ask /health again and again: what it waits is what the event loop keeps everybody waiting."""
    while True:
        began = time.perf_counter()
        try:
            async with session.get("/health") as response:
                await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            felt.failed[f"health: {type(error).__name__}"] += 1
        else:
            felt.note("health", began)
        await asyncio.sleep(PROBE_S)


async def honest(url: str, key: str, felt: Felt) -> None:
    """Be an honest tenant until cancelled."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(url, headers={"x-api-key": key}, timeout=timeout) as session:
        clients = [Honest(session, felt, number).live() for number in range(CLIENTS)]
        await asyncio.gather(probe(session, felt), *clients)
