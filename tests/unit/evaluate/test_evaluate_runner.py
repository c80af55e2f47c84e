"""The runner and `Evaluation` against a fake gateway that speaks the real HTTP dialect."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ostinato.core.errors import BadRequest, Conflict, Corrupt, Unauthorized, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import Verdict
from ostinato.evaluate.answers import read_answers
from ostinato.evaluate.evaluation import Evaluation
from ostinato.evaluate.gate import GateConfig
from ostinato.evaluate.runner import RunnerConfig, SuiteRunner, item_seed
from ostinato.evaluate.suites import parse

V7, V9 = PolicyVersion(number=7, hash="aa"), PolicyVersion(number=9, hash="bb")
SUITE = parse(
    "held-out",
    "\n".join(
        json.dumps(
            {
                "id": f"i{i}",
                "family": "f",
                "messages": [{"role": "user", "content": f"task {i}"}, {"role": "assistant", "content": "def"}],
                "continue_final_message": True,
                "sampling": {"max_tokens": 8, "temperature": 0.5, "stop": ["\n"]},
                "grader": "parity",
            }
        )
        for i in range(6)
    ),
)


class Gateway:
    """Choice i of a request with seed s answers a number made of s and i, from whatever version the slot holds."""

    def __init__(self):
        self.slots = {"candidate": [V9], "live": [V7]}
        self.health = []  # states of the candidate slot that /health reports first
        self.bodies, self.failures, self.keys = [], [], set()
        self.most = self.now = 0

    async def report(self, request):
        slots = {name: versions[0] for name, versions in self.slots.items() if versions}
        if self.health:
            slots["candidate"] = self.health.pop(0)
        body = {n: {"number": p.number, "hash": p.hash} for n, p in slots.items() if p is not None}
        return web.json_response({"status": "ready", "model": "smol", "slots": body})

    async def handle(self, request):
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await asyncio.sleep(0.002)
            return await self.answer(request)
        finally:
            self.now -= 1

    async def answer(self, request):
        if self.failures:
            status = self.failures.pop(0)
            if status == 0:
                request.transport.close()
            return web.json_response({"error": "no"}, status=status or 500)
        body, slot = await request.json(), request.headers["X-Ostinato-Slot"]
        self.keys.add(request.headers.get("X-Ostinato-Key"))
        self.bodies.append((slot, body))
        versions = self.slots[slot]
        made_by = versions.pop(0) if len(versions) > 1 else versions[0]
        made_by = made_by if isinstance(made_by, tuple) else (made_by,)
        choices = [
            {"index": i, "message": {"role": "assistant", "content": str(answer_to(body["seed"], i))}}
            for i in reversed(range(body["n"]))
        ]
        return web.json_response({"choices": choices, "ostinato": {"spans": [[p.number, p.hash, 2] for p in made_by]}})


def answer_to(seed, index):
    return (seed * 31 + index * 17) // 3 % 1000


@pytest.fixture
async def gateway():
    fake = Gateway()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.handle)
    app.router.add_get("/health", fake.report)
    async with TestServer(app) as server:
        fake.url = str(server.make_url("/"))
        yield fake


async def parity(item, text):
    return float(int(text) % 2)


def runner(gateway, grader=parity, **changes):
    config = {"retry_pause_s": 0.01, "concurrency": 4, "samples_per_request": 4} | changes
    return SuiteRunner(SUITE, grader, gateway.url, "admin-key", RunnerConfig(**config))


def by_draw(scores):
    return sorted(scores, key=lambda score: (score.item, score.draw))


async def test_a_draw_means_the_same_randomness_whoever_is_asked_and_whatever_is_known(gateway):
    at_once = await runner(gateway).run("candidate", V9, range(10))
    in_parts = [
        s for part in (range(3), range(3, 4), range(4, 10)) for s in await runner(gateway).run("live", V7, part)
    ]
    assert by_draw(at_once) == by_draw(in_parts)
    expected = [float(answer_to(item_seed(SUITE, item) + d // 4, d % 4) % 2) for item in SUITE.items for d in range(10)]
    assert [score.score for score in by_draw(at_once)] == expected
    assert gateway.most <= 4
    assert gateway.keys == {"admin-key"}


async def test_request_is_that_of_a_user(gateway):
    await runner(gateway).run("candidate", V9, range(6, 8), SUITE.items[1:2])
    slot, body = gateway.bodies[-1]
    assert slot == "candidate"
    assert body == {
        "model": "smol",
        "messages": [{"role": "user", "content": "task 1"}, {"role": "assistant", "content": "def"}],
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 1.0,
        "stop": ["\n"],
        "n": 4,
        "seed": item_seed(SUITE, SUITE.items[1]) + 1,
        "user": "eval",
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


async def test_waits_for_the_slot_before_anything_is_sampled(gateway):
    gateway.health = [None, V7, V7]
    scores = await runner(gateway).run("candidate", V9, range(4))
    assert len(scores) == 24
    assert len(gateway.bodies) == 6


async def test_an_answer_that_mixed_versions_is_asked_for_again(gateway):
    gateway.slots["candidate"] = [V9, (V7, V9), V9]
    scores = await runner(gateway).run("candidate", V9, range(4))
    assert len({(s.item, s.draw) for s in scores}) == len(scores) == 24
    assert len(gateway.bodies) == 6 + 1


async def test_a_slot_that_moved_on_ends_the_run(gateway):
    gateway.slots["candidate"] = [V9, V9, PolicyVersion(number=10, hash="cc")]
    with pytest.raises(Conflict, match="moved on to v10@cc"):
        await runner(gateway).run("candidate", V9, range(4))


async def test_a_slot_that_never_serves_the_version_is_named(gateway):
    gateway.slots["candidate"] = [V7]
    with pytest.raises(Unavailable, match=r"waiting for slot 'candidate' to serve v9@bb; it serves v7@aa"):
        await runner(gateway, slot_timeout_s=0.05).run("candidate", V9, range(1))


async def test_transient_failures_are_tried_again(gateway):
    gateway.failures = [503, 0, 502, 429]
    assert len(await runner(gateway).run("candidate", V9, range(2))) == 12


async def test_lasting_failures_are_named(gateway):
    gateway.failures = [503] * 50
    with pytest.raises(Unavailable, match=r"failed 3 times.*503"):
        await runner(gateway, attempts=3).run("candidate", V9, range(1))
    gateway.failures = [401]
    with pytest.raises(Unauthorized, match="admin_key"):
        await runner(gateway).run("candidate", V9, range(1))
    gateway.failures = [400]
    with pytest.raises(BadRequest, match=r"slot 'candidate'.*400"):
        await runner(gateway).run("candidate", V9, range(1))


async def test_deadline_says_how_far_it_came(gateway):
    async def slow(item, text):
        await asyncio.sleep(0 if item.id == "i0" else 60)
        return 1.0

    with pytest.raises(Unavailable, match=r"deadline of 0\.3 s with 1 of 6 requests graded"):
        await runner(gateway, slow, deadline_s=0.3).run("candidate", V9, range(1))


async def test_a_grader_outside_its_range_is_refused(gateway):
    async def wild(item, text):
        return float("nan")

    with pytest.raises(Corrupt, match="grader 'parity' gave item 'i"):
        await runner(gateway, wild).run("candidate", V9, range(1))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"index": 0, "message": {"content": 3}}], "ostinato": {"spans": []}}',
        b'{"choices": [{"index": 0, "message": {"content": ""}}]}',
        b'{"choices": [{"index": 0, "message": {"content": "x"}}], "ostinato": {"spans": []}}',
        b'{"choices": [{"index": 0, "message": {"content": ""}}], "ostinato": {"spans": [["1", "a", 2]]}}',
        b'{"choices": [{"index": 1, "message": {"content": ""}}], "ostinato": {"spans": []}}',
    ],
)
def test_answers_of_another_form_are_corrupt(raw):
    with pytest.raises(Corrupt):
        read_answers(raw, 1)


async def test_evaluation_samples_nothing_twice_and_survives_a_restart(gateway):
    gate = GateConfig(margin=0.5, first_draws=2, max_draws=8)
    first = Evaluation(runner(gateway, samples_per_request=2), gate)
    report = await first.run(
        V9, against=V7
    )  # the fake answers alike for both: all differences are 0, on only six items
    assert (report.difference, report.draws, report.suite_hash) == (0.0, 2, SUITE.hash)
    assert report.verdict == Verdict.EXTEND
    asked = len(gateway.bodies)

    evidence = json.loads(json.dumps(first.evidence(V9, V7)))
    second = Evaluation(runner(gateway, samples_per_request=2), gate)
    second.restore(evidence)
    assert second.scores(V9) == first.scores(V9)
    assert (await second.run(V9, against=V7)).draws == 4
    assert len(gateway.bodies) - asked == 12  # draws 2 and 3 of six items for two versions

    gateway.slots["candidate"] = [v11 := PolicyVersion(number=11, hash="dd")]
    asked = len(gateway.bodies)
    await second.run(v11, against=V9)  # v9 has become live: its scores are known
    assert {slot for slot, _ in gateway.bodies[asked:]} == {"candidate"}


def test_evidence_of_another_suite_is_ignored_and_misshapen_evidence_refused():
    class Nobody:
        suite = SUITE

    evaluation = Evaluation(Nobody(), GateConfig())
    evaluation.restore({"suite_hash": "other", "scores": {"aa": [[1.0]]}})
    assert evaluation.scores(V7) == []
    with pytest.raises(Corrupt, match="has 1 items, the suite 6"):
        evaluation.restore({"suite_hash": SUITE.hash, "scores": {"aa": [[1.0]]}})
