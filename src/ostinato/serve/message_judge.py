"""The judge: a model that labels next messages, a few at a time, without delaying calls. Tenants take turns.

If the judge is down, slow or answers nonsense, only its own label is missing: the rules have labelled the message already.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import NamedTuple

from ostinato.core.fair_share import InTurn
from ostinato.core.generation import Usage
from ostinato.core.records import Sampling
from ostinato.serve.config import JudgeConfig
from ostinato.serve.feedback.next_message import NextMessage
from ostinato.serve.judge_prompt import VERSION, Case, label_in, question
from ostinato.serve.metrics import Metrics
from ostinato.serve.outside_models import Breaker, OutsideFailed, OutsideModel, OutsideQuery, key_of

_MAX_CALLS = 4  # concurrent calls
_WAITING = 256  # queued messages, shared by the tenants that have any
_KNOWN = 16_384  # ids of messages already accepted, so that a repeated one is not judged twice
_MINUTE_S = 60.0
_FAILURES, _REST_S, _LONGEST_REST_S = 5, 15.0, 600.0


class LabelledMessage(NamedTuple):
    """A message and its label by the rules."""

    case: Case
    kind: NextMessage


class _Waiting(NamedTuple):
    tenant: str
    labelled: LabelledMessage
    tell: Callable[[NextMessage], None]


class Judge:
    """Labels messages, or a sampled share of them. `start` it on the event loop that uses it; `close` it when done.

    Args:
        config: the judge's URL and limits; `url` must be set.
        metrics: counts each label, and each missing label with its reason.
        keys: the environment variables, one of which holds the judge's key; None: `os.environ`.

    Raises:
        BadConfig: the key's variable is not set.

    Example: ``judge.ask("acme", "next-3f", LabelledMessage(case, NextMessage.GOES_ON), tell)``
    """

    def __init__(self, config: JudgeConfig, metrics: Metrics, *, keys: Mapping[str, str] | None = None) -> None:
        self._config = config
        self._metrics = metrics
        self._arm = config.arm
        breaker = Breaker(failures=_FAILURES, rest_s=_REST_S, longest_s=_LONGEST_REST_S)
        key = key_of(self._arm, os.environ if keys is None else keys, "serve.judge")
        self._model = OutsideModel(self._arm, key, breaker, who="judge of next messages")
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()  # (tenant, id)
        self._waiting: InTurn[str, _Waiting] = InTurn()
        self._open: set[asyncio.Task[None]] = set()
        self._recent_calls: deque[tuple[float, str]] = deque()  # start time and tenant of the last minute's calls
        self._asked: dict[str, float] = {}  # tenant -> arrival time of its last message
        self._closed = False

    @property
    def decides(self) -> bool:
        """True if the judge's label replaces the rules' label."""
        return self._config.decides

    def comment(self, kind: NextMessage) -> str:
        """Return the comment of a signal with the judge's label.

        Example: ``"complaint (judge@1, small-2)"``
        """
        return f"{kind.value} ({VERSION}, {self._config.model})"

    async def start(self) -> None:
        """Start the model's client."""
        await self._model.start()

    async def close(self) -> None:
        """Stop judging: calls in progress are cancelled, and queued messages keep only the rules' label."""
        self._closed = True
        while (each := self._waiting.next()) is not None:
            self._metrics.not_judged(each.tenant, "closed")
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)
        await self._model.close()

    def ask(self, tenant: str, id: str, labelled: LabelledMessage, tell: Callable[[NextMessage], None]) -> None:
        """Queue a message if it is in the judged share. Does not wait.

        Args:
            tenant: the message's tenant.
            id: identifies the message. A hash of it decides whether the message is judged; each id is judged at most once.
            labelled: the message and its label by the rules.
            tell: called on the event loop with the judge's label; not called if there is none.
        """
        if not self._accepts(tenant, id):
            return
        self._known[tenant, id] = None
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        self._asked[tenant] = now = asyncio.get_running_loop().time()
        if self._closed or self._waiting.count(tenant) >= max(1, _WAITING // (1 + len(self._others(tenant, now)))):
            self._metrics.not_judged(tenant, "closed" if self._closed else "full")
            return
        self._waiting.put(tenant, _Waiting(tenant, labelled, tell))
        self._start_calls()

    def _accepts(self, tenant: str, id: str) -> bool:
        if (self._config.tenants and tenant not in self._config.tenants) or (tenant, id) in self._known:
            return False
        return int.from_bytes(sha256(f"{tenant}\n{id}".encode()).digest()[:8]) < self._config.share * 2**64

    def _start_calls(self) -> None:
        while len(self._open) < _MAX_CALLS and not self._closed and (each := self._waiting.next()) is not None:
            task = asyncio.get_running_loop().create_task(self._label(each))
            self._open.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._start_calls()

    async def _label(self, each: _Waiting) -> None:
        now = asyncio.get_running_loop().time()
        if not self._has_room(each.tenant, now):
            self._metrics.not_judged(each.tenant, "limit")
            return
        if not self._model.available:
            self._metrics.not_judged(each.tenant, "resting")
            return
        self._recent_calls.append((now, each.tenant))
        try:
            label = label_in(await self._answer(each))
        except OutsideFailed as error:
            self._metrics.not_judged(each.tenant, "timeout" if isinstance(error.__cause__, TimeoutError) else "failed")
        except asyncio.CancelledError:
            self._metrics.not_judged(each.tenant, "closed")
            raise
        else:
            if label is None:
                self._metrics.not_judged(each.tenant, "no_label")
                return
            self._metrics.judged(each.tenant, each.labelled.kind.value, label.value)
            each.tell(label)

    def _has_room(self, tenant: str, now: float) -> bool:
        """True if a call for this tenant may begin. Half of a minute's calls are shared; the other half is reserved in equal shares."""
        while self._recent_calls and now - self._recent_calls[0][0] >= _MINUTE_S:
            self._recent_calls.popleft()
        begun = Counter(whose for _, whose in self._recent_calls)
        others = self._others(tenant, now)
        share = self._config.calls_per_minute // (2 * (len(others) + 1))
        kept = sum(max(0, share - begun[whose]) for whose in others)
        return len(self._recent_calls) + kept < self._config.calls_per_minute

    def _others(self, tenant: str, now: float) -> list[str]:
        """Return the other tenants that had messages in the last minute."""
        return [whose for whose, at in self._asked.items() if now - at < _MINUTE_S and whose != tenant]

    async def _answer(self, each: _Waiting) -> str:
        """Return the judge's answer. Raises OutsideFailed."""
        config, text = self._config, ""
        query = OutsideQuery(
            conversation=question(each.labelled.case, schema_sent=config.schema_sent),
            sampling=Sampling(max_tokens=config.max_tokens, temperature=config.temperature),
            n=1,
        )
        usage: Usage | None = None
        async for chunk in self._model.chunks(query):
            text += chunk.text
            usage = chunk.usage or usage
        if usage is not None:
            cost = self._arm.cost(usage.prompt, usage.answer)
            self._metrics.judge_used(each.tenant, usage.prompt, usage.answer, cost)
        return text
