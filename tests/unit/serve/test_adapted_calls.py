"""Which calls lean to their person, what the log and the client are told, and that feedback reaches the dials."""

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.adapt.people import cache_at
from tests.unit.serve.gateway_world import ADMIN, V0, V1, world

from ostinato.adapt.config import AdaptConfig, ResetConfig, TenantAdaptConfig
from ostinato.adapt.dials import DialAdaptation
from ostinato.core.arm_assignment import Dealing
from ostinato.core.records import SteeringBasis
from ostinato.core.steering import Basis, Steered, Steering
from ostinato.testing.engine import FakeEngine
from ostinato.testing.log import MemoryLog

BASIS = Basis(
    names=("brief", "lists"), tokens_M=np.array([2, 7]), directions_KM=np.eye(2, dtype=np.float32), weights=V0.hash
)


class SteeringEngine(FakeEngine):
    """Tells of every steered answer that its tokens lay one unit along the first dial, whatever the dials."""

    def __init__(self, script=None, **more):
        super().__init__(script, **more)
        self.steerings = []

    async def generate(self, request):
        told = None
        self.steerings.append(request.steering)
        if request.steering is not None:
            asked = request.steering
            told = Steered(
                basis=asked.basis.hash,
                dials=asked.dials,
                cap=asked.cap,
                budget=asked.budget,
                tokens=5,
                kl=0.04,
                features=(1.0, 0.0),
            )
        async for chunk in super().generate(replace(request, steering=None)):
            yield replace(chunk, steered=told)


class Everybody:
    """Leans everybody; notes whom it was asked for."""

    def __init__(self, *, fitted=True):
        self.asked, self.feedback, self.open, self.compared, self._fitted = [], 0, False, set(), fitted

    async def start(self):
        self.open = True

    async def close(self):
        self.open = False

    def steering(self, person, *, weights, verified):
        self.asked.append((person, weights, verified))
        return Steering(basis=BASIS, dials=(0.5, 0.0), cap=0.1, budget=3.0)

    def fits(self, weights):
        self.compared.add(weights)
        return self._fitted or not weights

    def heard(self):
        self.feedback += 1


async def test_a_persons_answer_leans_and_the_log_and_the_client_are_told():
    adaptation = Everybody()
    async with world(engine=SteeringEngine(lambda request: "hello"), adaptation=adaptation) as w:
        assert adaptation.open
        status, headers, _ = await w.chat(user="ann", n=2)
        assert status == 200
        assert headers["x-ostinato-adapted"] == f"{BASIS.hash}; kl=0.04,0.04"
        assert adaptation.asked == [(("default", "ann"), V0.hash, False)]
        assert [turn.steered.dials for turn in w.log.turns()] == [(0.5, 0.0)] * 2
        assert "x-ostinato-adapted" in (await w.chat({"x-ostinato-train": "adapt"}, user="ann"))[1]
        _, headers, _ = await w.chat(user="ann", stream=True)
        assert headers["x-ostinato-adapted"] == BASIS.hash
        assert w.engine.steerings[-1].dials == (0.5, 0.0)
        await w.feedback(w.log.turns()[0].id)
        assert adaptation.feedback == 1
    assert not adaptation.open


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-ostinato-adapt": "off"}, {"user": "ann"}),
        ({"x-ostinato-purpose": "side"}, {"user": "ann"}),
        ({"x-ostinato-purpose": "compaction"}, {"user": "ann"}),
        ({"x-api-key": ADMIN, "x-ostinato-slot": "live"}, {"user": "ann"}),
        ({}, {}),
        ({}, {"user": "ann", "response_format": {"type": "json_object"}}),
        ({"x-ostinato-train": "aggregate"}, {"user": "ann"}),
    ],
    ids=["off", "side", "compaction", "slot", "nobody", "form", "no consent"],
)
async def test_other_calls_are_the_base_models_to_the_bit(headers, fields):
    adaptation = Everybody()
    async with world(engine=SteeringEngine(lambda request: "{}"), adaptation=adaptation, admin_keys=[ADMIN]) as w:
        status, told, _ = await w.chat(headers, **fields)
        assert status == 200
        assert "x-ostinato-adapted" not in told
        assert adaptation.asked == []
        assert w.engine.steerings == [None]
        assert w.log.turns()[0].steered is None


async def test_the_control_arm_never_leans():
    adaptation, engine = Everybody(), SteeringEngine(slots={"live": V1, "control": V0})
    async with world(engine=engine, adaptation=adaptation, control_share=1.0) as w:
        await w.chat(user="ann")
        assert w.log.turns()[0].arm == "control"
        assert adaptation.asked == []


@pytest.mark.parametrize("fitted", [True, False])
async def test_while_two_releases_are_compared_people_lean_on_both_or_on_neither(fitted):
    """A basis belongs to one version's weights, so that leaning on one alone would be counted for that version."""
    slots = {"live": V0, "canary": V1, "previous": V1, "control": V1}
    trials = [Dealing(salt="a", canary=0.5), Dealing(salt="a", previous=0.5)]
    for dealing in (*trials, None, Dealing(salt="a", verified=0.5)):
        adaptation, engine = Everybody(fitted=fitted), SteeringEngine(slots=slots)
        async with world(engine=engine, adaptation=adaptation, control_share=0.2) as w:
            w.app.deal(dealing)
            for number in range(30):
                await w.chat(user=f"u{number}")
            people = [turn for turn in w.log.turns() if turn.arm != "control"]
            assert sum(turn.arm == "live" for turn in people) < 30
            assert len(adaptation.asked) == (len(people) if fitted or dealing not in trials else 0)
            assert adaptation.compared == {frozenset({V0.hash, V1.hash} if dealing in trials else ())}
    for dealing in trials:  # until the candidate is loaded, its slot holds the live weights, and nobody is dealt to it
        adaptation, engine = Everybody(fitted=fitted), SteeringEngine(slots={"live": V0, "canary": V0, "previous": V0})
        async with world(engine=engine, adaptation=adaptation) as w:
            w.app.deal(dealing)
            await w.chat(user="ann")
            assert len(adaptation.asked) == 1


async def test_a_header_that_says_neither_is_refused_by_name():
    async with world(adaptation=Everybody()) as w:
        status, _, body = await w.chat({"x-ostinato-adapt": "maybe"}, user="ann")
        assert status == 400
        assert body["error"]["param"] == "X-Ostinato-Adapt"
        assert body["error"]["message"] == "X-Ostinato-Adapt takes on or off."


@pytest.mark.parametrize("steers", ["exact", "static"])
async def test_an_engine_that_can_only_bias_whole_answers_leans_none_that_may_hold_a_call_or_has_biases(steers):
    engine = SteeringEngine(lambda request: "hello")
    can = engine.capabilities()
    engine.capabilities = lambda: replace(can, steers=steers)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    async with world(engine=engine, adaptation=Everybody()) as w:
        for more in ({}, {"tools": [tool]}, {"logit_bias": {"7": 1.0}}):
            status, _, _ = await w.chat(user="ann", **more)
            assert status == 200
    assert [steering is not None for steering in engine.steerings] == [True, *[steers == "exact"] * 2]


# ---------------------------------------------------------------- with dials


OPEN = AdaptConfig(mode="dials", users="declared", holdout=0.0)


async def adaptation_of(log, tmp_path, config=OPEN, bases=(BASIS,)):
    await log.append(*(SteeringBasis.of(basis, at=1.0) for basis in bases))
    adaptation = DialAdaptation(log, cache_at(tmp_path), config)
    await adaptation.follow()
    return adaptation


async def test_what_a_person_accepts_moves_their_dials_and_nobody_elses(tmp_path):
    log = MemoryLog()
    adaptation = await adaptation_of(log, tmp_path)
    async with world(engine=SteeringEngine(lambda request: "hello"), log=log, adaptation=adaptation) as w:
        for number in range(8):
            await w.chat(user="ann")
            await w.feedback(w.log.turns()[-1].id, id=f"s{number}")
            await adaptation.follow()
        await w.chat(user="bob")
        await w.chat(user="ann")
        first, bob, ann = (w.log.turns()[place].steered.dials for place in (0, -2, -1))
        assert first == bob == (0.0, 0.0)
        assert ann[0] > 0.05
        assert ann[1] == 0.0


async def test_a_basis_that_moves_a_protected_token_is_not_used_and_says_how_to_mend_it(tmp_path, caplog):
    log, tokens = MemoryLog(), BASIS.tokens_M.tolist()
    await log.append(SteeringBasis.of(BASIS, at=1.0))
    for protected, used in (([max(tokens) + 1], True), ([max(tokens) + 1, tokens[0]], False)):
        adaptation = DialAdaptation(log, cache_at(tmp_path / str(used)), OPEN, protected=protected)
        await adaptation.follow()
        found = adaptation.steering(("acme", "ann"), weights=BASIS.weights, verified=False)
        assert ((found is not None), [*adaptation.refused]) == (used, [] if used else [BASIS.weights])
    assert f"it moves 1 protected tokens, such as {tokens[0]}. Run `ostinato adapt fit` again" in caplog.text


async def test_of_bases_that_are_not_used_the_newest_are_remembered(tmp_path):
    log, tokens = MemoryLog(), BASIS.tokens_M.tolist()
    adaptation = DialAdaptation(log, cache_at(tmp_path), OPEN, protected=[tokens[0]])
    weights = [f"{number:064x}" for number in range(40)]
    for number, each in enumerate([*weights, weights[20]]):
        basis = Basis(BASIS.names, BASIS.tokens_M, BASIS.directions_KM * (1 + number), each)
        await log.append(SteeringBasis.of(basis, at=1.0 + number))
    await adaptation.follow()
    assert [*adaptation.refused] == [*weights[8:20], *weights[21:], weights[20]]


async def test_who_has_dials(tmp_path):
    ann, weights = ("acme", "ann"), BASIS.weights

    async def asked(config=OPEN, bases=(BASIS,), *, person=ann, weights=weights, verified=False):
        adaptation = await adaptation_of(MemoryLog(), tmp_path, config, bases)
        return adaptation.steering(person, weights=weights, verified=verified)

    steering = await asked()
    assert (steering.basis.hash, steering.dials, steering.cap, steering.budget) == (BASIS.hash, (0.0, 0.0), 0.1, 3.0)
    assert await asked(bases=()) is None
    assert await asked(weights=V1.hash) is None  # the basis was fitted to other weights
    assert await asked(OPEN.model_copy(update={"users": "verified"})) is None
    assert await asked(OPEN.model_copy(update={"users": "verified"}), verified=True) is not None
    assert await asked(OPEN.model_copy(update={"holdout": 1.0}), verified=True) is None
    off = OPEN.model_copy(update={"tenants": {"acme": TenantAdaptConfig(prior="off")}})
    assert await asked(off) is None
    assert await asked(off, person=("bolt", "ann")) is not None


async def test_the_holdout_is_dealt_by_name_alone_and_keeps_whom_it_has(tmp_path):
    people = [("acme", f"user {number}") for number in range(2000)]

    async def held(share):
        adaptation = await adaptation_of(MemoryLog(), tmp_path, OPEN.model_copy(update={"holdout": share}))
        return {person for person in people if adaptation.held_out(person)}

    few, more = await held(0.1), await held(0.2)
    assert few < more
    assert 140 < len(few) < 260
    assert await held(0.0) == set()


async def test_a_new_basis_of_other_names_begins_other_states(tmp_path):
    log, ann = MemoryLog(), ("acme", "ann")
    adaptation = await adaptation_of(log, tmp_path)

    async def add(names, directions, weights):
        basis = Basis(names=names, tokens_M=BASIS.tokens_M, directions_KM=directions, weights=weights)
        await log.append(SteeringBasis.of(basis, at=2.0))
        await adaptation.follow()
        return basis

    def basis_of(weights):
        steering = adaptation.steering(ann, weights=weights, verified=False)
        return None if steering is None else steering.basis.hash

    same = await add(BASIS.names, 2 * BASIS.directions_KM, V1.hash)
    assert (basis_of(V0.hash), basis_of(V1.hash)) == (BASIS.hash, same.hash)
    await log.append(replace(SteeringBasis.of(same, at=3.0), hash="0" * 32))  # not what its hash names
    await add(tuple(f"dial {number}" for number in range(17)), np.ones((17, 2), np.float32), "fake2")
    assert (basis_of(V0.hash), basis_of(V1.hash), basis_of("fake2")) == (BASIS.hash, same.hash, None)
    other = await add(("you",), BASIS.directions_KM[:1], "fake3")
    assert (basis_of(V1.hash), basis_of("fake3")) == (None, other.hash)


def test_the_default_settings_are_off_and_name_their_reasons():
    config = AdaptConfig()
    assert (config.mode, config.users, config.reset) == ("off", "verified", ResetConfig(drift=0.2, limit=3.6))
    with pytest.raises(ValueError, match="signals"):
        AdaptConfig(signals={"accepted": 2.0})
