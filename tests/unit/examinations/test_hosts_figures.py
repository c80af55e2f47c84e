"""The judge of the examination over hosts: sound evidence has no problem, and each planted fault is named."""

from copy import deepcopy
from dataclasses import replace

import pytest
from tests.examinations.hosts.figures import Evidence, judge
from tests.examinations.hosts.storm import Event

TURN = {
    "episode": "k1",
    "user": "sim-01",
    "arm": "live",
    "text": "hi",
    "finish": "stop",
    "at": 10.0,
    "roots": ["r0"],
    "numerics": "",
}
TRY = {"gateway": 1, "at": 9.0, "s": 1.0, "end": "answered"}
HAVE = {"kind": "have", "at": 30.5, "ref": "live", "number": 2, "hash": "r2", "bytes": "b2", "sound": True}


def event(action, root, at, actor=None):
    return {
        "action": action,
        "number": int(root[1]),
        "hash": root,
        "previous": 0,
        "at": at,
        "actor": actor,
        "reason": "",
    }


def evidence():
    base = event("shipped", "r0", 0.0) | {"previous": None}
    facts = {
        "turns": {"t1": dict(TURN), "t2": TURN | {"episode": "k2", "at": 20.0}},
        "doubled turns": 0,
        "signals": {"demo/k1": 1},
        "rows out of order": 0,
        "versions": ["r0", "r1", "r2"],
        "account": {"contradictions": []},
        "balanced": True,
        "batches": [{"step": 1, "turns": ["t1"], "at": 12.0, "torn": False, "back": False}],
        "releases": [
            base,
            event("evaluated", "r2", 29.0),
            event("shipped", "r2", 30.0),
            event("rolled_back", "r2", 40.0, "ann"),
        ],
        "acceptance": {"last third": {"live minus control": {"mean": 0.3, "lower": 0.2, "upper": 0.4}}},
        "refs": {"live": "r2", "control": "r0"},
        "slots": [{"live": "r2"}, {"live": "r2"}],
    }
    call = {
        "kind": "call",
        "at": 10.0,
        "key": "k1",
        "user": "sim-01",
        "tries": [dict(TRY)],
        "outcome": "accepted",
        "turn": "t1",
        "text": "hi",
    }
    said = {
        "kind": "signal",
        "at": 11.0,
        "id": "k1",
        "turn": "t1",
        "name": "accepted",
        "ends": ["taken"],
        "again": "taken",
    }
    return Evidence(
        grounds={"packets vanish in a cut": True},
        facts=facts,
        users=[{"kind": "began", "at": 0.0}, call, said, {"kind": "ended", "at": 50.0}],
        followers={name: [dict(HAVE)] for name in ("follower-1", "follower-2")},
        gateways={"gateway-1": [], "gateway-2": []},
        trainers={"trainer-1": [{"kind": "step", "step": 1, "at": 12.0}]},
        crews={},
        alive=True,
        events=[Event(name="gateway-2 cut off from Postgres", began=100.0, ended=120.0)],
        wire={},
        users_status=0,
    )


def test_sound_evidence_has_no_problem():
    found = judge(evidence())
    assert found["problems"] == []
    assert found["followers"]["seconds behind a release, median and most"]["follower-1"] == [0.5, 0.5]


def fails(seen, gateway, at):
    seen.users[1]["tries"].insert(0, TRY | {"gateway": gateway, "at": at, "end": "http 503"})


PLANTED = {
    "acknowledged turns lost": lambda seen: seen.facts["turns"].pop("t1"),
    "turns with another text": lambda seen: seen.facts["turns"]["t1"].update(text="ho"),
    "turns doubled": lambda seen: seen.facts.update({"doubled turns": 1}),
    "calls that were answered twice": lambda seen: seen.facts["turns"]["t2"].update(episode="k1"),
    "acknowledged signals lost": lambda seen: seen.facts["signals"].clear(),
    "signals doubled": lambda seen: seen.facts["signals"].update({"demo/k1": 2}),
    "changed between live and control": lambda seen: seen.facts["turns"]["t2"].update(arm="control"),
    "weights that nobody published": lambda seen: seen.facts["turns"]["t2"].update(roots=["r9"]),
    "batches missing, doubled or out of order": lambda seen: seen.facts["batches"][0].update(step=2),
    "batches torn": lambda seen: seen.facts["batches"][0].update(torn=True),
    "turns in two batches": lambda seen: seen.facts["batches"].append(seen.facts["batches"][0] | {"step": 2}),
    "turns do not add up": lambda seen: seen.facts.update(balanced=False),
    "releases shipped twice": lambda seen: seen.facts["releases"].append(event("shipped", "r2", 35.0)),
    "shipped without a verdict": lambda seen: seen.facts["releases"].pop(1),
    "rolled back by hand other than once": lambda seen: seen.facts["releases"].pop(),
    "not at one root with the same bytes": lambda seen: seen.followers["follower-2"][0].update(bytes="b3"),
    "do not fit their root": lambda seen: seen.followers["follower-1"][0].update(sound=False),
    "failed without a cause: 1 gateway-1": lambda seen: fails(seen, 1, 105.0),
    "failed without a cause: 1 gateway-2": lambda seen: fails(seen, 2, 140.0),
    "the lab is none": lambda seen: seen.grounds.update({"packets vanish in a cut": False}),
}


@pytest.mark.parametrize("told", PLANTED)
def test_a_planted_fault_is_named(told):
    seen = deepcopy(evidence())
    PLANTED[told](seen)
    problems = judge(seen)["problems"]
    assert any(told in problem for problem in problems), problems


def test_what_fails_at_a_gateway_that_is_cut_off_is_explained():
    seen = deepcopy(evidence())
    fails(seen, 2, 105.0)
    found = judge(seen)
    assert found["problems"] == []
    assert found["requests"]["failed while"] == {"gateway-2 cut off from Postgres": {"gateway-2: http 503": 1}}


def test_a_worker_that_is_down_and_users_that_failed_are_problems():
    assert judge(replace(evidence(), alive=False))["problems"] == ["a supervisor ended"]
    assert judge(replace(evidence(), users_status=1))["problems"] == ["the users ended with status 1"]


@pytest.mark.parametrize("lower", [0.0, -0.1])
def test_a_live_model_that_is_accepted_no_more_than_control_is_a_problem_where_the_model_can_learn(lower):
    seen = evidence()
    seen.facts["acceptance"]["last third"]["live minus control"]["lower"] = lower
    assert judge(seen)["problems"] == ["in the last third live is not accepted more than control"]
    assert not judge(seen, learns=False)["problems"]
