"""Runs a suite through the gateway, over the same HTTP path as people, and grades the answers.

All versions are paired by item and randomness. Draws of an item come in blocks of `samples_per_request`: draw d is
choice ``d % size`` of the n-sample request with seed ``item_seed + d // size``. That holds for every version and however many
draws are known already, so within one round (item, draw) means the same random numbers; the gateway shares a block's prompt.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from blake3 import blake3

from ostinato.core.errors import Corrupt, OstinatoError, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import ItemScore
from ostinato.evaluate.config import RunnerConfig
from ostinato.evaluate.gateway import (
    Response,
    bounded,
    check_version,
    first_error,
    patiently,
    read_answers,
    refusal,
    served_model,
)
from ostinato.evaluate.suites import Item, Suite

ItemGrader = Callable[[Item, str], Awaitable[float]]
"""(item, answer text) -> score in [0, 1]."""


@dataclass(frozen=True, slots=True)
class _Block:
    """One request per item: the block's number (its seed), the number of samples, and the draws that the last samples are."""

    number: int
    samples: int
    draws: range


def item_seed(suite: Suite, item: Item, shift: int = 0, seed: int = 0) -> int:
    """Seed of an item's first block: a hash of suite, item, `shift` and `seed`.

    It lies below 2**31 - 2**16, so that adding a block's number keeps 31 bits.
    """
    digest = blake3(f"{suite.hash}\0{item.id}\0{shift}\0{seed}".encode()).digest(length=8)
    return int.from_bytes(digest, "big") % (2**31 - 2**16)


class SuiteRunner:
    """One suite, one grader, one gateway."""

    def __init__(
        self, suite: Suite, grader: ItemGrader, base_url: str, admin_key: str | None, config: RunnerConfig
    ) -> None:
        self.suite = suite
        self._grader = grader
        root = base_url.rstrip("/").removesuffix("/v1")
        self._url, self._health = root + "/v1/chat/completions", root + "/health"
        self._key = admin_key
        self._config = config

    async def run(
        self, slot: str, policy: PolicyVersion, draws: range, items: Sequence[Item] | None = None, *, seed: int = 0
    ) -> list[ItemScore]:
        """Scores of `items` (default: all) for each draw, every token of which was made by `policy`. Another `seed`: fresh draws.

        Raises:
            Unavailable: the gateway did not answer, or the slot did not come to serve `policy`, in the configured time.
            Conflict: the slot has moved on to a newer version.
            BadRequest, Unauthorized: the gateway refused a request.
        """
        chosen = self.suite.items if items is None else items
        if len(draws) == 0 or not chosen:
            return []
        timeout = aiohttp.ClientTimeout(total=self._config.request_timeout_s)
        connector = aiohttp.TCPConnector(limit=self._config.concurrency)
        progress = [0, 0]
        try:
            async with (
                asyncio.timeout(self._config.deadline_s),
                aiohttp.ClientSession(headers=self._headers(slot), timeout=timeout, connector=connector) as session,
            ):
                blocks = _blocks(draws, self._config.samples_per_request)
                return await self._all(session, slot, policy, blocks, chosen, seed, progress)
        except TimeoutError as error:
            raise Unavailable(
                f"evaluation of {policy} in slot {slot!r} passed its deadline of {self._config.deadline_s:g} s with "
                f"{progress[0]} of {progress[1]} requests graded; raise evaluate.runner.deadline_s or shrink the suite"
            ) from error

    async def _all(
        self,
        session: aiohttp.ClientSession,
        slot: str,
        policy: PolicyVersion,
        blocks: list[_Block],
        items: Sequence[Item],
        seed: int,
        progress: list[int],
    ) -> list[ItemScore]:
        model = await patiently(
            self._config, f"GET {self._health}", lambda: served_model(session, self._health, slot, policy)
        )
        gate = asyncio.Semaphore(self._config.concurrency)
        work = [(item, block) for item in items for block in blocks]
        progress[1] = len(work)

        async def one(item: Item, block: _Block) -> list[ItemScore]:
            async with gate:
                responses, seconds = await patiently(
                    self._config,
                    f"item {item.id!r} in slot {slot!r}",
                    lambda: self._ask(session, slot, policy, self._body(model, item, block, seed)),
                )
            wanted = zip(block.draws, responses[-len(block.draws) :], strict=True)
            graded = [await self._grade(item, draw, response, seconds) for draw, response in wanted]
            progress[0] += 1
            return graded

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(item, block)) for item, block in work]
        except* OstinatoError as errors:
            raise first_error(errors) from errors
        return [score for task in tasks for score in task.result()]

    async def _grade(self, item: Item, draw: int, response: Response, seconds: float) -> ItemScore:
        score = float(await self._grader(item, response.text))
        if not (math.isfinite(score) and 0.0 <= score <= 1.0):
            raise Corrupt(f"grader {item.grader!r} gave item {item.id!r} the score {score}; it must lie in [0, 1]")
        return ItemScore(item=item.id, draw=draw, score=score, formed=response.formed, seconds=seconds)

    async def _ask(
        self, session: aiohttp.ClientSession, slot: str, policy: PolicyVersion, body: dict[str, Any]
    ) -> tuple[list[Response], float]:
        """The answers, and the seconds that they took."""
        began = time.monotonic()
        async with session.post(self._url, json=body) as response:
            raw = await bounded(response)
            if response.status != 200:
                raise refusal(response.status, raw.decode(errors="replace"), f"slot {slot!r}", response.headers)
        responses, policies = read_answers(raw, body["n"])
        for found in policies:
            check_version(slot, policy, found)
        return responses, time.monotonic() - began

    def _body(self, model: str, item: Item, block: _Block, seed: int) -> dict[str, Any]:
        sampling = item.sampling
        body: dict[str, Any] = {
            "model": model,
            "messages": [message.model_dump() for message in item.messages],
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "n": block.samples,
            "seed": item_seed(self.suite, item, self._config.seed, seed) + block.number,
            "user": "eval",
        }
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if item.continue_final_message:
            body["continue_final_message"] = True
            body["add_generation_prompt"] = False
        return body

    def _headers(self, slot: str) -> dict[str, str]:
        headers = {"X-Ostinato-Slot": slot}
        return headers if self._key is None else headers | {"X-Ostinato-Key": self._key}


def _blocks(draws: range, size: int) -> list[_Block]:
    """The requests that hold these draws; a block wanted from its middle is sampled from its start."""
    blocks: list[_Block] = []
    for number in range(draws.start // size, (draws.stop - 1) // size + 1):
        first, stop = number * size, min(draws.stop, (number + 1) * size)
        blocks.append(_Block(number, stop - first, range(max(draws.start, first), stop)))
    return blocks
