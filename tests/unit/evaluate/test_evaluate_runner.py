"""The runner and `Evaluation` against a fake gateway that speaks the real HTTP dialect."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from ostinato.core.errors import BadRequest, Conflict, Corrupt, Unauthorized, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.core.report import Incumbents, Verdict
from ostinato.core.retry import RetryLater
from ostinato.evaluate.config import BarConfig, GateConfig
from ostinato.evaluate.evaluation import Evaluation
from ostinato.evaluate.gate import seed_of
from ostinato.evaluate.gateway import Response, read_answers, refusal
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
            {
                "index": i,
                "message": {"role": "assistant", "content": str(answer_to(body["seed"], i))},
                "finish_reason": "length" if body["seed"] % 5 == 0 else "stop",
            }
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


def test_an_answer_is_well_formed_if_it_says_something_and_ended_by_itself():
    raw = json.dumps(
        {
            "choices": [
                {"index": i, "message": {"content": text}, "finish_reason": finish}
                for i, (text, finish) in enumerate([("x", "stop"), ("x", "length"), ("", "stop"), (None, "stop")])
            ],
            "ostinato": {"spans": [[7, "aa", 4]]},
        }
    )
    responses, _ = read_answers(raw.encode(), 4)
    assert responses == [Response("x", True), Response("x", False), Response("", False), Response("", False)]


async def test_a_seed_draws_afresh_and_scores_say_how_long_and_how_well_formed(gateway):
    first, same, other = [await runner(gateway).run("live", V7, range(8), seed=seed) for seed in (1, 1, 2)]
    assert by_draw(first) == by_draw(same) != by_draw(other)
    assert all(0.001 < score.seconds < 5 for score in first)
    assert {score.formed for score in [*first, *other]} == {True, False}


# ------------------------------------------------------------------------------------------------ the sides of a judgement

V0, V3 = PolicyVersion(number=0, hash="00"), PolicyVersion(number=3, hash="33")


def standing(live=V7, best=V7, anchor=V7, round=0):
    return Incumbents(live=live, best=best, anchor=anchor, round=round)


LOOKS = GateConfig(margin=0.5, total_margin=0.5, first_draws=2, max_draws=8, sealed_share=0.0)


async def test_evaluation_samples_nothing_twice_and_survives_a_restart(gateway):
    first = Evaluation([runner(gateway, samples_per_request=2)], LOOKS)
    report = await first.run(V9, against=standing())
    # the fake answers alike for both: all differences are 0, on only six items
    assert (report.difference, report.draws, report.suite_hash) == (0.0, 2, SUITE.hash)
    assert report.verdict == Verdict.EXTEND
    asked = len(gateway.bodies)
    assert asked == 12, "live, best and anchor are one version, which is drawn once"

    evidence = json.loads(json.dumps(first.evidence()))
    second = Evaluation([runner(gateway, samples_per_request=2)], LOOKS)
    second.restore(evidence)
    assert second.scores(SUITE, V9) == first.scores(SUITE, V9)
    assert (await second.run(V9, against=standing())).draws == 4
    assert len(gateway.bodies) - asked == 12  # draws 2 and 3 of six items for two versions
    seeds = {body["seed"] for _, body in gateway.bodies}
    assert len(seeds) == 12, "candidate and live share their seeds, draw by draw"
    assert item_seed(SUITE, SUITE.items[0], 0, seed_of(SUITE, V9.hash, 0)) in seeds


async def test_draws_that_got_a_version_chosen_are_never_used_again(gateway):
    """Live's draws were kept: a version that shipped by lucky draws kept its luck against every later candidate."""
    evaluation = Evaluation([runner(gateway)], LOOKS)
    await evaluation.run(V9, against=standing(round=0))
    before = {body["seed"] for _, body in gateway.bodies}
    gateway.bodies.clear()
    gateway.slots |= {"live": [V9], "control": [V7], "candidate": [v11 := PolicyVersion(number=11, hash="dd")]}
    await evaluation.run(v11, against=standing(live=V9, best=V9, round=1))
    assert {slot for slot, _ in gateway.bodies} == {"candidate", "live", "control"}, "v9 is drawn again as live"
    after = {body["seed"] for _, body in gateway.bodies}
    assert not before & after, "from other seeds"


async def test_every_incumbent_is_asked_in_a_slot_that_serves_it(gateway):
    gateway.slots |= {"control": [V0], "shown": [V3]}
    evaluation = Evaluation([runner(gateway)], LOOKS, best_slot="shown")
    report = await evaluation.run(V9, against=standing(best=V3, anchor=V0))
    assert {slot for slot, _ in gateway.bodies} == {"candidate", "live", "control", "shown"}
    assert {str(found.against): found.policy for found in report.comparisons} == {"live": V7, "anchor": V0, "best": V3}
    gateway.bodies.clear()
    await evaluation.run(V9, against=standing(best=V0, anchor=V0, round=1))
    assert {slot for slot, _ in gateway.bodies} == {"candidate", "live", "control"}
    gateway.bodies.clear()
    report = await evaluation.run(V9, against=standing(best=None, anchor=V0, round=2))
    assert {slot for slot, _ in gateway.bodies} == {"candidate", "live", "control"}
    assert "was not sampled" in report.reason


async def test_bars_are_held_against_the_candidate_alone_where_a_suite_is_only_for_them(gateway):
    class Safety(SuiteRunner):
        """Its suite has the same items under another name."""

    safety = Safety(
        parse("safety", "\n".join(item.model_dump_json() for item in SUITE.items)),
        parity,
        gateway.url,
        "admin-key",
        RunnerConfig(retry_pause_s=0.01),
    )
    bars = (BarConfig(suite="safety", at_least=0.9), BarConfig(axis="latency", at_most=60.0, share=0.3))
    report = await Evaluation([runner(gateway)], LOOKS, bars=bars, aside=[safety]).run(V9, against=standing())
    assert report.verdict == Verdict.BLOCK
    assert report.reason.startswith("below a quality bar (score of safety")
    assert [(bar.suite, bar.axis, bar.holds) for bar in report.bars] == [
        ("safety", "score", False),
        ("held-out", "latency", True),
    ]
    assert {found.suite for found in report.comparisons} == {"held-out"}
    assert sum(slot == "candidate" for slot, _ in gateway.bodies) == 12
    assert sum(slot == "live" for slot, _ in gateway.bodies) == 6


def test_evidence_of_other_suites_and_forms_is_ignored_and_misshapen_evidence_refused():
    class Nobody:
        suite = SUITE

    evaluation = Evaluation([Nobody()], LOOKS)
    evaluation.restore({"suite_hash": SUITE.hash, "scores": {"aa": [[1.0]]}})
    evaluation.restore(
        {"candidate": "aa", "round": 0, "drawn": {"held-out:other": {"aa": [["i0", 0, 1.0, True, 0.1]]}}}
    )
    assert evaluation.scores(SUITE, V7) == []
    for rows in ([["i0"]], [1], None):
        with pytest.raises(Corrupt, match="promised form"):
            evaluation.restore({"candidate": "aa", "round": 0, "drawn": {f"held-out:{SUITE.hash}": {"aa": rows}}})


def test_a_refusal_says_when_the_gateway_wants_to_be_asked_again():
    busy = refusal(429, "too many", "slot 'live'", {"Retry-After": "2"})
    assert isinstance(busy, RetryLater)
    assert busy.retry_after_s == 2.0
    assert not isinstance(refusal(400, "no such field", "slot 'live'", {"Retry-After": "2"}), Unavailable)
