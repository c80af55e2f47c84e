"""Simulated users against a small fake endpoint over real HTTP: who gets which feedback, under which ids, and when it ends."""

import asyncio
import itertools
import json
import math
from collections import Counter
from types import SimpleNamespace

import pytest
from aiohttp import web
from tests.deadlines import WHOLE_PROGRAM_S

from ostinato.demo import users
from ostinato.demo.tab import make_typists, split_lines
from ostinato.demo.tasks import load, split
from ostinato.demo.users import UsersConfig, make_users, run_users

TASKS, _ = split(load())
QUICK = {"think_s": 0.0, "reaction_s": 0.0, "late_share": 0.0, "streams_per_user": 2, "count": 5}


class Endpoint:
    """Answers in SSE as the gateway does; `misbehave` may replace the answer to request number n. Nobody is answered before `full`
    requests were open at once.
    """

    def __init__(self, misbehave=None, full=0, says=("\n    return bad", "\n    return good")):
        self.numbers, self.says = itertools.count(1), says
        self.misbehave, self.full, self.was_full = misbehave, full, asyncio.Event()
        self.requests, self.events, self.open, self.peak = [], [], 0, 0

    async def chat(self, request):
        body = await request.json()
        n = next(self.numbers)
        self.requests.append(body)
        self.open += 1
        self.peak = max(self.peak, self.open)
        try:
            if self.open >= self.full:
                self.was_full.set()
            await self.was_full.wait()
            if self.misbehave and (answer := self.misbehave(n)) is not None:
                return answer
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Ostinato-Arm": "live"})
            await response.prepare(request)
            text = self.says[n % 2]
            deltas = [{"choices": [{"index": 0, "delta": {"content": part}}]} for part in (text[:7], text[7:])]
            final = {
                "choices": [],
                "ostinato": {"turns": [f"r{n}:0"], "arm": "live", "spans": [[3, "aa", 2], [4, "bb", 5]]},
            }
            for event in (*deltas, final):
                await response.write(b"data: " + json.dumps({"id": f"r{n}", **event}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.open -= 1

    async def feedback(self, request):
        self.events.append(await request.json())
        return web.json_response({}, status=202)

    async def __aenter__(self):
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/feedback", self.feedback)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()


async def grade(task, text):
    return float("good" in text)


@pytest.fixture
def run(monkeypatch):
    """Simulated users at work until so many of their requests have ended: their clock stands still until then."""

    async def run(endpoint, ends=60, grader=grade, seed=1, tasks=TASKS, make=make_users, **config):
        settings, seen = UsersConfig(**{**QUICK, **config}), []
        clock = SimpleNamespace(monotonic=lambda: float(len(seen) >= ends))
        with monkeypatch.context() as patch:
            patch.setattr(users, "time", clock)
            async with asyncio.timeout(WHOLE_PROGRAM_S):
                crowd = make(tasks, settings, seed)
                stats = await run_users(endpoint.url, crowd, tasks, grader, 1.0, seed, settings, seen.append)
        assert seen == stats.outcomes
        return stats

    return run


def test_users_differ_and_come_from_the_seed():
    users = make_users(TASKS, UsersConfig(), 7)
    assert users == make_users(TASKS, UsersConfig(), 7)
    assert users != make_users(TASKS, UsersConfig(), 8)
    assert len({user.id for user in users}) == 50
    for trait in ("families", "patience_s", "patience_chars", "pace"):
        assert len({getattr(user, trait) for user in users}) > 30
    known = {task.family for task in TASKS}
    assert all(user.families and set(user.families) <= known for user in users)


async def test_feedback_says_what_the_tests_said(run):
    async with Endpoint() as endpoint:
        stats = await run(endpoint, noise=0.0, ignore_share=0.0, duplicate_share=0.0)
    assert len(stats.outcomes) >= 60
    assert not stats.failures
    by_turn = {event["target"]: event for event in endpoint.events}
    assert len(endpoint.events) == len(by_turn) == len(stats.outcomes)
    for outcome in stats.outcomes:
        odd = int(outcome.turn[1:].split(":")[0]) % 2 == 1
        assert outcome.true_pass is odd
        assert outcome.kind == by_turn[outcome.turn]["name"] == ("accepted" if odd else "rejected")
        assert (outcome.arm, outcome.policy) == ("live", 4)
    assert 0.35 < stats.acceptance("live") < 0.65
    assert stats.acceptance("canary") is None
    request = endpoint.requests[0]
    assert request["stream"] is True
    assert request["continue_final_message"] is True
    assert request["add_generation_prompt"] is False
    assert {r["user"] for r in endpoint.requests} == {f"sim-0{i}" for i in range(5)}


async def test_a_tenth_is_sent_twice_with_the_same_id(run):
    async with Endpoint() as endpoint:
        stats = await run(endpoint, duplicate_share=0.5, ignore_share=0.0)
    ids = Counter(event["id"] for event in endpoint.events)
    assert set(ids.values()) == {1, 2}
    assert len(ids) == len(stats.outcomes)
    for id in ids:
        assert len({json.dumps(event, sort_keys=True) for event in endpoint.events if event["id"] == id}) == 1


async def test_one_judgement_in_twenty_is_wrong_and_the_truth_is_kept(run):
    """Of one stream of requests, so that which judgements are wrong follows from the seed."""
    async with Endpoint() as endpoint:
        stats = await run(endpoint, ends=200, count=1, streams_per_user=1, ignore_share=0.0, duplicate_share=0.0)
    wrong = sum(outcome.true_pass != (outcome.kind == "accepted") for outcome in stats.outcomes)
    total = len(stats.outcomes)
    assert wrong == stats.flipped
    assert abs(wrong - 0.05 * total) < 4 * (0.05 * 0.95 * total) ** 0.5 + 1
    assert wrong > 0


async def test_ignored_answers_get_no_feedback(run):
    async with Endpoint() as endpoint:
        stats = await run(endpoint, ignore_share=1.0)
    assert endpoint.events == []
    assert {outcome.kind for outcome in stats.outcomes} == {"ignored"}


async def test_a_body_too_long_to_read_is_rejected(run):
    async with Endpoint() as endpoint:
        stats = await run(endpoint, patience_chars=(3, 4), noise=0.0, ignore_share=0.0)
    assert {outcome.kind for outcome in stats.outcomes} == {"rejected"}
    assert any(outcome.true_pass for outcome in stats.outcomes)


async def test_failures_are_counted_by_kind_and_end_nothing(run):
    def misbehave(n):
        data = [
            None,
            web.Response(status=503),
            web.Response(body=b"data: {broken\n\n", content_type="text/event-stream"),
            web.Response(body=b'data: {"id": "x", "choices": []}\n\n', content_type="text/event-stream"),
            web.Response(body=b'data: {"error": {"code": "unavailable"}}\n\n', content_type="text/event-stream"),
        ]
        return data[n % 5]

    async with Endpoint(misbehave) as endpoint:
        stats = await run(endpoint, ends=20, ignore_share=0.0)
    assert {"http 503", "malformed stream", "no [DONE]", "stream error unavailable"} <= set(stats.failures)
    assert sum(stats.failures.values()) == sum(outcome.kind == "failed" for outcome in stats.outcomes)
    assert any(outcome.kind in ("accepted", "rejected") for outcome in stats.outcomes)


async def test_what_was_not_shown_is_not_judged(run):
    lines, _ = split_lines()
    calm = {"ignore_share": 0.0, "noise": 0.0, "duplicate_share": 0.0}
    judged = []

    async def never(line, text):
        judged.append(text)
        return 0.0

    async with Endpoint(says=(" -", " Monday")) as endpoint:
        stats = await run(endpoint, grader=never, tasks=lines, make=make_typists, **calm)
    kinds = Counter(outcome.kind for outcome in stats.outcomes)
    assert set(kinds) == {"silent", "rejected"}
    assert abs(kinds["silent"] - kinds["rejected"]) <= 1
    assert all(outcome.true_pass is None for outcome in stats.outcomes if outcome.kind == "silent")
    assert set(judged) == {" Monday"}
    assert len(endpoint.events) == kinds["rejected"]
    assert {event["target"] for event in endpoint.events} == {o.turn for o in stats.outcomes if o.kind == "rejected"}
    assert all(request["messages"][-1]["content"].endswith(",") for request in endpoint.requests)


async def test_an_absent_endpoint_is_counted_too(run):
    class Nowhere:
        url = "http://127.0.0.1:9"

    stats = await run(Nowhere, ends=1)
    assert stats.failures["connection ClientConnectorError"] == stats.asked == len(stats.outcomes) > 0


async def test_impatient_users_leave_and_the_server_is_freed(run):
    async with Endpoint(full=math.inf) as endpoint:
        stats = await run(endpoint, ends=10, patience_s=(0.05, 0.1))
        assert {outcome.kind for outcome in stats.outcomes} == {"abandoned"}
        assert not stats.failures


async def test_streams_and_graders_are_bounded(run):
    grading, peak, two = 0, 0, asyncio.Event()

    async def slow(task, text):
        nonlocal grading, peak
        grading += 1
        peak = max(peak, grading)
        if grading == 2:
            two.set()
        await two.wait()
        await asyncio.sleep(0.01)
        grading -= 1
        return 1.0

    async with Endpoint(full=12) as endpoint:
        await run(endpoint, grader=slow, grading=2, count=4, streams_per_user=3)
    assert endpoint.peak == 12
    assert peak == 2


async def test_cancelling_waits_for_no_answer(run):
    async with Endpoint(full=math.inf) as endpoint:
        running = asyncio.create_task(run(endpoint))
        async with asyncio.timeout(WHOLE_PROGRAM_S):
            while endpoint.open < 10:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running], timeout=WHOLE_PROGRAM_S)
        assert running.cancelled()


async def test_popular_tasks_repeat(run):
    async with Endpoint() as endpoint:
        stats = await run(endpoint, ends=100)
    asked = Counter(outcome.task for outcome in stats.outcomes)
    assert asked.most_common(1)[0][1] >= 3
    assert len(asked) > 10
