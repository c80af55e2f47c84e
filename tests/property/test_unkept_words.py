"""Levels from all sources in any order: what `never` covers is in no file of the run and in no state that is folded from its log."""

import contextlib
import hashlib
import random
import re

import pytest
from tests.oracles.turn_accounting import recount
from tests.oracles.words_on_disk import where
from tests.unit.serve.gateway_world import world

from ostinato.core.errors import NoSignal
from ostinato.core.records import Batch, Consent, Holdback, PolicyVersion, Turn
from ostinato.record.config import RecordConfig
from ostinato.record.folds import FileFolds
from ostinato.record.log import SqlLog
from ostinato.reward.config import RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import Inline
from ostinato.serve.config import PrivacyConfig
from ostinato.status.log_index import Feed, PageIndex
from ostinato.status.summary import keep, summarise
from ostinato.testing.engine import FakeEngine, decode

TENANTS = {"acme": "sk-acme-0123456789", "bank": "sk-bank-0123456789"}
V0 = PolicyVersion(number=0, hash="00")
LEVELS = [None, *Consent]
PATHS = {
    "/v1/chat/completions": lambda words, tool: {
        "messages": [{"role": "user", "content": words("prompt")}],
        "stop": [words("stop")],
        "metadata": {"note": words("metadata")},
        "tools": [{"type": "function", "function": tool}],
    },
    "/v1/completions": lambda words, tool: {"prompt": words("prompt"), "stop": words("stop"), "max_tokens": 900},
    "/v1/messages": lambda words, tool: {
        "messages": [{"role": "user", "content": words("prompt")}],
        "stop_sequences": [words("stop")],
        "max_tokens": 900,
    },
    "/v1/responses": lambda words, tool: {
        "input": words("prompt"),
        "instructions": words("system"),
        "metadata": {"note": words("metadata")},
        "tools": [{"type": "function", **tool}],
    },
}


def marker(number, place):
    """32 bytes that are nowhere else."""
    return hashlib.sha256(f"{number} {place}".encode()).hexdigest()[:32]


def answer(request):
    """A text and a tool call with a marker of their own, made from the last one in the prompt."""
    asked = re.findall("[0-9a-f]{32}", decode(request.prompt_ids))[-1]
    said = hashlib.sha256(asked.encode()).hexdigest()[:32]
    return f'{said}\n<tool_call>\n{{"name": "read", "arguments": {{"path": "{said}"}}}}\n</tool_call>'


def answer_marker(number):
    return hashlib.sha256(marker(number, "prompt").encode()).hexdigest()[:32]


class Traffic:
    """Random calls, and feedback before or after their ends. `unkept` and `kept` are the markers of the turns by what should become of
    them, and `levels` says how each call should have been dealt with.
    """

    def __init__(self, w, rng, privacy):
        self.w, self.rng, self.privacy = w, rng, privacy
        self.kept, self.unkept, self.levels = [], [], {}

    def expected(self, tenant, asked, store):
        named = {self.privacy.train, self.privacy.tenants.get(tenant, Consent.YES)}
        named |= {Consent(asked)} if asked else set()
        named |= {self.privacy.store_false} if store is False else set()
        return next(level for level in Consent if level in named)

    async def call(self, number):
        rng = self.rng
        path, tenant, asked = rng.choice([*PATHS]), rng.choice([*TENANTS]), rng.choice(LEVELS)
        store = rng.choice([None, True, False]) if path != "/v1/messages" else None
        planted = list[str]()

        def words(place):
            planted.append(marker(number, place))
            return planted[-1]

        tool = {"name": "read", "parameters": {"type": "object", "properties": {words("schema"): {"type": "string"}}}}
        body = {"model": "m", **PATHS[path](words, tool)} | ({} if store is None else {"store": store})
        headers = {"x-api-key": TENANTS[tenant]} | ({} if asked is None else {"x-ostinato-train": asked})
        headers |= {"idempotency-key": f"k{number}"} if rng.random() < 0.3 else {}
        status, told, reply = await self.w.post(path, body, headers=headers)
        assert status == 200, reply
        (turn,) = told["x-ostinato-turn"].split(",")
        for event in range(rng.randrange(3)):
            said = {name: words(f"{name} {event}") for name in ("comment", "correction")}
            name = rng.choice(["accepted", "rejected"])
            await self.w.feedback(turn, TENANTS[tenant], id=f"{number} {event}", name=name, **said)
        self.levels[turn] = self.expected(tenant, asked, store)
        told_markers = {answer_marker(number), marker(number, "prompt")}
        told_markers |= {each for each in planted if each in (marker(number, f"comment {i}") for i in range(3))}
        if self.levels[turn] is Consent.NEVER:
            self.unkept += [*planted, answer_marker(number)]
        else:
            self.kept += told_markers


@pytest.mark.parametrize("seed", range(6))
async def test_words_that_must_not_be_kept_are_nowhere_and_every_turn_is_accounted_for(tmp_path, seed):
    rng = random.Random(seed)
    draw = lambda: rng.choice([*Consent, Consent.YES, Consent.YES, Consent.YES])  # noqa: E731
    privacy = PrivacyConfig(train=draw() if seed else Consent.YES, tenants={"bank": draw()}, store_false=draw())
    keys = tuple(f"{tenant}:{key}" for tenant, key in TENANTS.items())
    log = SqlLog.open(tmp_path / "log", config=RecordConfig(segment_rows=40))
    folds, index = FileFolds(tmp_path / "folds"), PageIndex(tmp_path / "folds" / "page.sqlite", words=True)
    config = RewardConfig(user_cap=1.0, fold_rows=7)
    with log:
        async with world(engine=FakeEngine(answer), log=log, privacy=privacy, api_keys=keys, next_message=True) as w:
            desk = RewardDesk(log, Inline(copilot, max_abs=100.0), lambda: w.now, config, folds=folds)
            traffic, feed, step = Traffic(w, rng, privacy), Feed(log, index, lambda: True), 0
            for number in range(40):
                await traffic.call(1000 * seed + number)
                if rng.random() < 0.2:
                    w.now += 4000.0
                    with contextlib.suppress(NoSignal):
                        step += await desk.batch(step + 1, 2, V0) is not None
                    await keep((await summarise(log, folds, log.newest()))[0], folds)
                    while await feed.step():
                        pass
            w.now += 1e6
            await desk.poll()
            await desk.close()
        assert traffic.unkept
        assert where(tmp_path, traffic.unkept) == []  # with the write-ahead logs of open files
        turns = {row.id: row async for _, row in log.read(0, {Turn})}
        assert {id: turn.consent for id, turn in turns.items()} == traffic.levels
        trained = {turn async for _, row in log.read(0, {Batch}) for turn in row.turns}
        held = {row.turn: row.reason async for _, row in log.read(0, {Holdback})}
        for turn, level in traffic.levels.items():
            if level is not Consent.YES:
                assert held[turn] == f"consent:{level}"
                assert turn not in trained
        found = await recount(log)
        assert found.balanced, found.contradictions
        assert found.ingested == found.trained + sum(found.held.values()) + found.waiting == len(turns)
    index.close()
    assert where(tmp_path, traffic.unkept) == []
    shown = {word for _, word in where(tmp_path, traffic.kept)}
    assert shown == set(traffic.kept), "the search finds what is kept"
