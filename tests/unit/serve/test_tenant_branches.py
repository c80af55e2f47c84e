"""A tenant's branch: its own version of the weights answers its calls and nobody else's, and is moved like a ref."""

import json

import numpy as np
import pytest
from rich.console import Console
from tests.unit.serve.gateway_world import ADMIN, V0, V1, World, world

from ostinato.app.storage import home, live_last, open_store, served_refs
from ostinato.config import load
from ostinato.core.arm_assignment import Dealing
from ostinato.core.errors import BadConfig, BadRequest, NotFound
from ostinato.core.records import Arm, PolicyVersion
from ostinato.core.weights import WeightArray
from ostinato.launch.commands.release import ship_branch
from ostinato.reward.ledger_entries import LEARNING_ARMS, untrainable
from ostinato.serve.config import ServeConfig
from ostinato.testing.engine import FakeEngine
from ostinato.weights.publish.publisher import VersionPublisher

ACME, BOLT = "sk-acme-0123456789abcdef", "sk-bolt-0123456789abcdef"
OWN = PolicyVersion(number=7, hash="own")
KEYS = {"api_keys": [f"acme:{ACME}", f"bolt:{BOLT}"], "branches": ["acme"], "branch_holdout": 0.0}


def engine(**slots):
    return FakeEngine(lambda request: "hello", slots={"live": V1, "control": V0, "canary": V0, **slots})


async def answered(w, key, **more):
    """The arm, the versions and the propensity of an answer."""
    status, _, body = await w.chat({"x-api-key": key, **more.pop("headers", {})}, **more)
    assert status == 200, body
    turn = w.log.turns()[-1]
    return turn.arm, turn.versions, turn.propensity


async def test_its_tenants_calls_and_nobody_elses_are_answered_by_it():
    async with world(engine=engine(**{"branch/acme": OWN}), control_share=0.5, **KEYS) as w:
        w.app.deal(Dealing(salt="trial", canary=0.5))
        users = [f"user {number}" for number in range(40)]
        mine = [await answered(w, ACME, user=user) for user in users] + [await answered(w, ACME)]
        assert set(mine) == {(Arm.BRANCH, (OWN,), 1.0)}, "on no other arm, under no name"
        others = [await answered(w, BOLT, user=user) for user in users]
        assert {arm for arm, *_ in others} == {Arm.LIVE, Arm.CONTROL, Arm.CANARY}
        assert all(OWN not in versions for _, versions, _ in others)
        told = await answered(w, BOLT, user="acme", headers={"X-Ostinato-Tenant": "acme"})
        assert told[1] != (OWN,)


async def test_another_tenant_cannot_name_it_and_is_not_told_of_it():
    async with world(engine=engine(**{"branch/acme": OWN}), admin_keys=[ADMIN], **KEYS) as w:
        for key in (BOLT, ACME):
            assert (await w.chat({"x-api-key": key, "x-ostinato-slot": "branch/acme"}))[0] == 401
        assert await answered(w, ADMIN, headers={"x-ostinato-slot": "branch/acme"}) == (Arm.EVAL, (OWN,), 1.0)
        slots = {
            key: json.loads((await w.get("/health", {"x-api-key": key}))[1])["slots"] for key in (ACME, BOLT, ADMIN)
        }
        assert ["branch/acme" in slots[key] for key in (ACME, BOLT, ADMIN)] == [True, False, True]
        assert "acme" not in (await w.get("/metrics", {"x-api-key": BOLT}))[1]
    judged = engine(**{"branches/acme/evaluation": OWN})
    async with world(engine=judged, admin_keys=[ADMIN], **KEYS) as w:
        for key in (ACME, BOLT):
            assert "acme" not in (await w.get("/health", {"x-api-key": key}))[1]
            assert (await w.chat({"x-api-key": key, "x-ostinato-slot": "branches/acme/evaluation"}))[0] == 401
        assert await answered(w, ADMIN, headers={"x-ostinato-slot": "branches/acme/evaluation"}) == (
            Arm.EVAL,
            (OWN,),
            1.0,
        )


async def test_without_its_branch_or_the_setting_a_tenant_is_answered_as_everybody():
    async with world(engine=engine(), control_share=0.5, **KEYS) as w:
        w.app.deal(Dealing(salt="trial", canary=0.5))
        given = {await answered(w, ACME, user=f"user {number}") for number in range(20)}
        assert given == {(Arm.SHARED, (V1,), 1.0)}, "by live, which learns nothing from it"
    async with world(engine=engine(**{"branch/acme": OWN}), **{**KEYS, "branches": ["bolt"]}) as w:
        assert await answered(w, ACME, user="ann") == (Arm.LIVE, (V1,), 1.0)


async def test_a_share_of_its_users_stays_on_live_if_it_is_trained():
    kept = {**KEYS, "trained": ["acme"]}
    async with world(engine=engine(**{"branch/acme": OWN}), **{**kept, "branch_holdout": 0.25}) as w:
        users = [f"user {number}" for number in range(80)]
        given = {user: await answered(w, ACME, user=user) for user in users}
        assert {*given.values()} == {(Arm.BRANCH, (OWN,), 0.75), (Arm.SHARED, (V1,), 0.25)}
        stay = {user for user in users if given[user][0] is Arm.SHARED}
        assert 10 <= len(stay) <= 30
        assert await answered(w, ACME) == (Arm.BRANCH, (OWN,), 1.0), "many people behind no name"
    async with world(engine=engine(**{"branch/acme": OWN}), **{**kept, "branch_holdout": 0.5}) as w:
        more = {user for user in users if (await answered(w, ACME, user=user))[0] is Arm.SHARED}
    assert stay < more, "a share that grows keeps whom it has"
    served = {**KEYS, "api_keys": [*KEYS["api_keys"], "cato:sk-cato-0123456789abcdef"], "branches": ["acme", "cato"]}
    loaded = engine(**{"branch/acme": OWN, "branch/cato": OWN})
    async with world(engine=loaded, **{**served, "trained": ["cato"], "branch_holdout": 0.5}) as w:
        given = {await answered(w, ACME, user=user) for user in users}
        assert given == {(Arm.BRANCH, (OWN,), 1.0)}, "nobody is compared with anybody there"
        assert {(await answered(w, "sk-cato-0123456789abcdef", user=user))[2] for user in users} == {0.5}


async def test_a_conversation_does_not_go_on_over_another_versions_tokens():
    own = engine()
    async with world(engine=own, **KEYS) as w:
        messages = [{"role": "user", "content": "hi"}]
        await answered(w, ACME, user="ann", messages=messages)
        own._slots["branch/acme"] = OWN
        messages += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
        assert (await answered(w, ACME, user="ann", messages=messages))[1] == (OWN,)
        assert w.log.turns()[-1].parent is None


async def test_its_turns_are_held_back_by_name():
    async with world(engine=engine(**{"branch/acme": OWN}), **KEYS) as w:
        await answered(w, ACME, user="ann")
    async with world(engine=engine(), **KEYS) as before:
        await answered(before, ACME, user="ann")
    for (turn,), why in ((w.log.turns(), "arm:branch"), (before.log.turns(), "arm:shared")):
        assert untrainable(turn, 0.0) == untrainable(turn, 0.0, arms=LEARNING_ARMS) == why


def test_branches_are_named_by_tenants_with_keys():
    with pytest.raises(BadConfig, match=r"serve.branches: no key belongs to a tenant 'acne'; did you mean 'acme'"):
        World(engine(), None, ServeConfig(**{**KEYS, "branches": ["acne"]}), None)
    for name in ("Acme", "a/b", "..", ".a", "a..b", ""):
        with pytest.raises(ValueError, match="branches"):
            ServeConfig(branches=[name])


def test_a_gateway_loads_it_before_live():
    refs = served_refs(load(None, ["serve.branches=['acme']", f"serve.api_keys=['acme:{ACME}']"]))
    order = live_last(refs)
    assert sorted(order) == sorted(refs)
    assert order.index("branch/acme") < order.index("live") < order.index("evaluation")


async def test_it_is_shipped_and_taken_back_by_its_ref_alone(tmp_path):
    config = load(
        None, [f"run.directory='{tmp_path}/run'", "serve.branches=['acme']", f"serve.api_keys=['acme:{ACME}']"]
    )
    publisher, made = VersionPublisher(open_store(config)), []
    for number in range(2):
        weights = {"w": WeightArray("F32", (4,), np.full(16, number, np.uint8))}
        base = made[-1] if made else None
        made.append((await publisher.publish(number, weights, run="r", base=base, ref="live")).policy)

    async def shipped(version, tenant="acme"):
        out = Console(record=True, width=200)
        await ship_branch(config, version, tenant, "ann", out)
        return out.export_text(), await open_store(config).refs()

    said, refs = await shipped("v0")
    assert refs["branch/acme"] == made[0].hash
    assert refs["live"] == made[1].hash
    assert "answers acme's calls; engines" in said
    said, refs = await shipped("live")
    assert refs["branch/acme"] == made[1].hash
    assert f"(was {made[0]}; `ostinato ship v0 --for acme` takes it back)" in said
    said, refs = await shipped("v0")
    assert refs["branch/acme"] == made[0].hash
    with pytest.raises(BadConfig, match=r"serve.branches does not name 'bolt'"):
        await shipped("v0", "bolt")
    with pytest.raises((NotFound, BadRequest)):
        await shipped("v9")
    assert "branch/bolt" not in await open_store(config).refs()
    acts = [json.loads(line) for line in home(config).audit.read_text().splitlines() if line]
    assert [(act["kind"], act["version"], act["tenant"], act["actor"]) for act in acts[:3]] == [
        ("ship", version, "acme", "ann") for version in ("v0", "live", "v0")
    ]
