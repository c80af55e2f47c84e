"""The door against workers that are not what they say: real TLS, a real gateway, a log with other people's turns in it."""

import asyncio
import contextlib
import json
import socket
import ssl
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.certificates import Authority
from tests.fakes.gateways import KEY, world_gateway
from tests.fakes.stalling_engine import Stalls

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, BadRequest, Unavailable
from ostinato.core.records import Arm, Batch, Finish, Holdback, PolicyVersion, Purpose, Signal
from ostinato.testing.log import MemoryLog
from ostinato.testing.records import a_turn
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.harness.rollout import OVERRAN, OutOfTime
from ostinato.worlds.rollout import rollout_server
from ostinato.worlds.rollout.config import DoorConfig
from ostinato.worlds.rollout.groups import SpentGroups
from ostinato.worlds.rollout.mutual_tls import door_context, worker_context
from ostinato.worlds.rollout.rollout_server import OUTCOMES, Door, FarOutcomes, OwnTurns

ASK = (Message(role=Role.USER, text="hi"),)
CHAT = {"model": "auto", "messages": [{"role": "user", "content": "hi"}]}
OWN = {"X-Ostinato-Episode": "w1.0.0.0", "X-Ostinato-Group": "w1.0"}


class Site:
    """A trainer's side with a door, and certificates for whoever comes."""

    def __init__(self, authority, url, gateway, log, door, signed, context):
        self.authority, self.url, self.gateway, self.log, self.door = authority, url, gateway, log, door
        self.signed, self.context = signed, context  # the door's own

    @asynccontextmanager
    async def worker(self, name="acme", authority=None, **more):
        signed = (authority or self.authority).sign(name, **more)
        context = worker_context(signed.certificate, signed.key, self.authority.file)
        async with WorldGateway(self.url, "", timeout_s=PATIENT_S, context=context) as gateway:
            yield gateway

    async def says(self, gateway, method, path, body=None, headers=None):
        """Status and answer, whatever they are."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with gateway._session.request(method, self.url + path, data=data, headers=headers) as answer:
            return answer.status, await answer.text()


@asynccontextmanager
async def site(tmp_path, script="hello", engine=None, days=1, **more):
    authority = Authority(tmp_path)
    signed = authority.sign("trainer", days=days)
    async with AsyncExitStack() as stack:
        gateway, log = await stack.enter_async_context(world_gateway(script, engine=engine))
        listener = socket.create_server(("127.0.0.1", 0))
        context = door_context(signed.certificate, signed.key, authority.file)
        door = await stack.enter_async_context(Door(gateway, OwnTurns(log), listener, context, DoorConfig(**more)))
        port = listener.getsockname()[1]
        yield Site(authority, f"https://127.0.0.1:{port}", gateway, log, door, signed, context)


def event(name, turn, value=1.0, **more):
    return {"id": f"{name}:{turn}", "target": turn, "name": name, "value": value, "source": "code", **more}


async def test_a_workers_turns_get_its_name_in_front_and_all_else_it_says_of_them_is_dropped(tmp_path):
    async with site(tmp_path) as at, at.worker() as gateway:
        model = gateway.model("w1.0.0.0", group="w1.0", harness="h1")
        answered = await model.ask(ASK, max_tokens=8)
        hostile = {
            **OWN,
            "X-Ostinato-Slot": "live",
            "X-Ostinato-Key": KEY,
            "X-Ostinato-User": "ann",
            "X-Ostinato-Purpose": "side",
        }
        body = CHAT | {"temperature": 0, "top_p": 0.1, "n": 100, "user": "ann", "seed": 1, "logit_bias": {"1": 9}}
        status, _ = await at.says(gateway, "POST", "/v1/chat/completions", body, hostile)
    first, second = at.log.turns()
    assert (status, first.id) == (200, answered.turn)
    for turn in (first, second):
        assert (turn.arm, turn.episode, turn.group, turn.user) == (
            Arm.WORLD,
            "acme/w1.0.0.0",
            "acme/w1.0",
            "world/acme",
        )
        assert (turn.sampling.temperature, turn.sampling.top_p, turn.sampling.logit_bias) == (1.0, 1.0, ())
        assert turn.purpose is Purpose.TASK
    assert (first.harness, second.harness) == ("h1", "")


async def test_a_summary_is_known_as_one_behind_the_door(tmp_path):
    async with site(tmp_path) as at, at.worker() as gateway:
        model = gateway.model("w1.0.0.0", group="w1.0", harness="h1")
        await model.ask(ASK, max_tokens=8, purpose=Purpose.COMPACTION)
    (turn,) = at.log.turns()
    assert (turn.purpose, turn.episode) == (Purpose.COMPACTION, "acme/w1.0.0.0")


async def test_the_time_that_a_rollout_has_left_is_known_behind_the_door(tmp_path):
    async with site(tmp_path, engine=Stalls(3)) as at, at.worker() as gateway:
        for seconds in (0.4, 4.0, 40.0):  # a busy machine may not even begin in the first
            with contextlib.suppress(OutOfTime):
                model = gateway.model("w1.0.0.0", group="w1.0", harness="h1")
                answered = await model.ask(ASK, max_tokens=50, left_s=seconds)
                break
        status, _ = await at.says(gateway, "POST", "/v1/chat/completions", CHAT, OWN | {"X-Ostinato-Left-Ms": "NaN"})
    (turn,) = at.log.turns()
    assert (answered.turn, answered.finish, turn.finish) == (turn.id, OVERRAN, Finish.DEADLINE)
    assert status == 400


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ("nobody", None),
        ("another authority's", None),
        ("expired", None),
        ("a name that is none", 401),
        ("not listed", 401),
        ("acme", 200),
    ],
)
async def test_who_may_come_in(tmp_path, who, said):
    async with site(tmp_path, names=("acme",)) as at:
        foreign = Authority(tmp_path, "other")
        name = {"a name that is none": "a/b", "not listed": "eve"}.get(who, "acme")
        signed = (foreign if who.startswith("another") else at.authority).sign(name, days=-1 if who == "expired" else 1)
        context = worker_context(signed.certificate, signed.key, at.authority.file)
        if who == "nobody":
            context = ssl.create_default_context(cafile=at.authority.file)
        async with WorldGateway(at.url, "", timeout_s=PATIENT_S, context=context) as gateway:
            if said is None:
                with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
                    await at.says(gateway, "GET", "/health")
                with pytest.raises(Unavailable):
                    await gateway.call("GET", "/health")
            else:
                assert (await at.says(gateway, "GET", "/health"))[0] == said
    assert at.log.turns() == []


async def test_a_worker_speaks_to_nobody_but_its_door(tmp_path):
    async with site(tmp_path) as at:
        foreign = Authority(tmp_path, "other")
        signed = at.authority.sign("acme")
        context = worker_context(signed.certificate, signed.key, foreign.file)
        async with WorldGateway(at.url, "", context=context) as gateway:
            with pytest.raises(Unavailable, match="certificate verify failed"):
                await gateway.call("GET", "/health")
        plain = at.url.replace("https", "http")
        async with WorldGateway(plain, "") as gateway:
            with pytest.raises(Unavailable):
                await gateway.call("GET", "/health")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/metrics"),
        ("GET", "/"),
        ("GET", "/v1/models"),
        ("POST", "/v1/logs"),
        ("POST", "/v1/traces"),
        ("POST", "/v1/completions"),
        ("POST", "/s/x/v1/chat/completions"),
        ("POST", "/v1/chat/completions/"),
        ("GET", "/v1/feedback"),
        ("POST", "/api/rollback"),
    ],
)
async def test_no_other_path_is_there(tmp_path, method, path):
    async with site(tmp_path) as at, at.worker() as gateway:
        status, _ = await at.says(
            gateway, method, path, CHAT if method == "POST" else None, {**OWN, "X-Ostinato-Key": KEY}
        )
    assert status == 404
    assert at.log.rows == []


async def test_health_names_the_worlds_slot_only(tmp_path):
    async with site(tmp_path) as at, at.worker() as gateway:
        status, said = await at.says(gateway, "GET", "/health")
    assert (status, list(json.loads(said)["slots"])) == (200, ["world"])


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (CHAT, {}),
        (CHAT, {"X-Ostinato-Episode": "e" * 400}),
        (CHAT | {"previous_response_id": "resp-1"}, OWN),
        (b"[]", OWN),
        (b"{", OWN),
        (b"[" * 100_000, OWN),
        (CHAT | {"messages": "none"}, OWN),
    ],
)
async def test_calls_that_are_none_are_refused(tmp_path, body, headers):
    async with site(tmp_path) as at, at.worker() as gateway:
        status, _ = await at.says(gateway, "POST", "/v1/chat/completions", body, headers)
    assert status == 400
    assert at.log.turns() == []


async def others(log):
    """Turns that are not acme's: a person's who took such a name, another worker's, one of this side's own rollouts."""
    person = replace(a_turn("p:0", arm=Arm.LIVE), episode="acme/w1.0.0.0", group="acme/w1.0")
    worker = replace(a_turn("o:0", arm=Arm.WORLD), episode="acme2/w1.0.0.0", group="acme2/w1.0")
    own = replace(a_turn("l:0", arm=Arm.WORLD), episode="w1.0.0.0", group="w1.0")
    await log.append(person, worker, own)
    return [person.id, worker.id, own.id]


async def test_rewards_are_told_of_own_turns_only_each_once_and_under_its_own_id(tmp_path):
    async with site(tmp_path) as at, at.worker() as gateway:
        foreign = await others(at.log)
        mine = (await gateway.model("w1.0.0.0", group="w1.0", harness="h").ask(ASK, max_tokens=8)).turn
        alone = (await gateway.model("w1.m0", group=None, harness="h").ask(ASK, max_tokens=8)).turn
        tell = lambda events: at.says(gateway, "POST", "/v1/feedback", events)  # noqa: E731
        for turn in (*foreign, "unknown:0"):
            assert (await tell([event("graded", mine), event("graded", turn)]))[0] == 401
        for wrong in ("accepted", "undone", "", None, ["graded"]):
            assert (await tell([event("graded", mine), event("graded", mine) | {"name": wrong}]))[0] in (400, 401)
        for value in (1.5, -0.1, 1e300, 10**400, True, None, "1", float("nan")):
            assert (await tell([event("graded", mine, value)]))[0] == 400
        for body in ([], {}, [1], [event("graded", mine)] * 1001, [event("graded", 7)], [event("group_closed", alone)]):
            assert (await tell(body))[0] == 400
        assert not [row for row in at.log.rows if isinstance(row, Signal)], "a call is taken whole or not at all"
        forged = event("graded", mine, 0.5, id="graded:l:0", comment="x", correction="y", retracts="z")
        assert (await tell([forged, event("group_closed", mine, 1.0, id="group_closed:w1.0")]))[0] == 202
        status, again = await tell([event("graded", mine, 1.0)])
    graded, closed = [row for row in at.log.rows if isinstance(row, Signal)]
    assert (graded.turn, graded.value, graded.retracts, graded.correction) == (mine, 0.5, None, None)
    assert (graded.id.startswith("graded:"), graded.id == forged["id"]) == (True, False)
    assert closed.id == "group_closed:acme/w1.0", "another's group cannot be closed before it is"
    assert (status, json.loads(again)[0]["status"]) == (202, "changed"), "the first word stays"


async def test_a_rollout_is_worth_what_one_of_its_turns_is(tmp_path):
    """The values of a rollout's turns are added up: graded at each of them it would weigh as much as it has turns."""
    async with site(tmp_path) as at, at.worker() as gateway:
        model = gateway.model("w1.0.0.0", group="w1.0", harness="h")
        first, second = [(await model.ask(ASK, max_tokens=8)).turn for _ in range(2)]
        grade = lambda *events: at.says(gateway, "POST", "/v1/feedback", list(events))  # noqa: E731
        status, said = await grade(event("graded", first, 1.0), event("graded", second, 1.0))
        assert (status, "graded at another turn" in said) == (400, True)
        for _ in range(2):  # told again after a lost answer
            assert (await grade(event("graded", first, 0.0), event("graded", second, 1.0)))[0] in (202, 400)
    values = {row.turn: row.value for row in at.log.rows if isinstance(row, Signal)}
    assert sum(values.values()) <= 1.0


async def test_a_rollout_is_worth_no_more_after_the_door_was_restarted(tmp_path):
    async with site(tmp_path) as at, at.worker() as gateway:
        model = gateway.model("w1.0.0.0", group="w1.0", harness="h")
        turns = [(await model.ask(ASK, max_tokens=8)).turn for _ in range(3)]
        await gateway.say([event("graded", turns[0], 1.0), event("graded", turns[1], 0.0)])
        at.door._graded.clear()  # this is all that a restart forgets
        with contextlib.suppress(BadRequest):
            await gateway.say([event("graded", turns[2], 1.0)])
        at.door._graded.clear()
        await gateway.say([event("graded", turns[0], 1.0), event("graded", turns[1], 0.0)])  # as after a lost answer
    values = [(row.turn, row.value) for row in at.log.rows if isinstance(row, Signal)]
    assert values == [(turns[0], 1.0), (turns[1], 0.0)]


async def test_outcomes_tell_of_own_turns_only(tmp_path):
    async with site(tmp_path) as at, at.worker() as gateway, at.worker("eve") as eve:
        foreign = await others(at.log)
        end = await FarOutcomes(gateway).end()
        mine = [
            (await gateway.model(f"w1.{n}.0.0", group=f"w1.{n}", harness="h").ask(ASK, max_tokens=8)).turn
            for n in range(3)
        ]
        policy = PolicyVersion(number=0, hash="00")
        await at.log.append(
            Batch(step=4, turns=(mine[0], foreign[2]), credits=((1.0,), (1.0,)), reference=policy, at=1.0),
            Holdback(turn=mine[1], reason="world:stale", at=1.0),
            Holdback(turn=foreign[0], reason="secret", at=1.0),
        )
        status, said = await at.says(gateway, "GET", f"{OUTCOMES}?after={end}")
        assert (status, json.loads(said)["taken"], json.loads(said)["held"]) == (
            200,
            mine[:1],
            [[mine[1], "world:stale"]],
        )
        assert not any(turn in said for turn in foreign)
        assert json.loads((await at.says(eve, "GET", f"{OUTCOMES}?after=0"))[1])["taken"] == []
        for after in ("", "-1", "x", "9" * 30):
            assert (await at.says(gateway, "GET", f"{OUTCOMES}?after={after}"))[0] == 400
        spending = SpentGroups(FarOutcomes(gateway), after=end)
        for number, turn in enumerate(mine):
            spending.expect(number, [turn])
        assert sorted(await spending.look()) == [0, 1]
        assert await spending.look() == []
        assert spending.steps == 4


async def test_many_outcomes_come_page_by_page_and_a_page_that_is_lost_comes_again(tmp_path):
    async with site(tmp_path) as at, at.worker() as gateway:
        mine = (await gateway.model("w1.0.0.0", group="w1.0", harness="h").ask(ASK, max_tokens=8)).turn
        await at.log.append(Holdback(turn=mine, reason="world:stale", at=0.0))
        await at.log.append(*(Holdback(turn=f"x{n}:0", reason="arm:live", at=1.0) for n in range(1200)))
        far = FarOutcomes(gateway)
        spending, asked, call = SpentGroups(far, after=0), 0, gateway.call

        async def losing(*words, **more):
            nonlocal asked
            asked += 1
            if asked == 3:
                raise Unavailable("lost")
            return await call(*words, **more)

        gateway.call = losing
        spending.expect(7, [mine])
        with pytest.raises(Unavailable):
            await spending.look()
        assert await spending.look() == [7], "what was found before the loss is not forgotten"
        assert spending.cursor == len(at.log.rows)


async def test_two_workers_with_the_same_names_never_meet(tmp_path):
    def script(request):
        return "secret" if len(request.prompt_ids) < 40 else "again"

    async with site(tmp_path, script) as at, at.worker() as acme, at.worker("eve") as eve:
        first = await acme.model("w1.0.0.0", group="w1.0", harness="h").ask(ASK, max_tokens=8)
        told = (*ASK, first.message, Message(role=Role.USER, text="more"))
        await eve.model("w1.0.0.0", group="w1.0", harness="h").ask(told, max_tokens=8)
        headers = {**OWN, "Idempotency-Key": "k", "Content-Type": "application/json"}
        answers = [await at.says(who, "POST", "/v1/chat/completions", CHAT, headers) for who in (acme, eve)]
    a, b, c, d = at.log.turns()
    assert b.parent is None, "what it says of another's conversation is text to it"
    assert [turn.group for turn in (a, b, c, d)] == ["acme/w1.0", "eve/w1.0", "acme/w1.0", "eve/w1.0"]
    assert answers[0][1] != answers[1][1], "nor does it get the answer to another's call"


async def test_a_worker_that_asks_too_much_at_once_is_told_so_and_others_are_not(tmp_path):
    async with site(tmp_path, calls=2) as at, at.worker() as acme, at.worker("eve") as eve:
        blocked, entered = asyncio.Event(), asyncio.Semaphore(0)
        call = at.gateway.call

        async def waits(*words, **more):
            entered.release()
            await blocked.wait()
            return await call(*words, **more)

        at.gateway.call = waits
        waiting = [asyncio.ensure_future(at.says(acme, "GET", "/health")) for _ in range(2)]
        for _ in waiting:
            await entered.acquire()
        assert (await at.says(acme, "GET", "/health"))[0] == 429
        other = asyncio.ensure_future(at.says(eve, "GET", "/health"))
        await entered.acquire()
        blocked.set()
        assert [status for status, _ in await asyncio.gather(*waiting, other)] == [200] * 3


async def test_bodies_and_groups_have_bounds(tmp_path, monkeypatch):
    monkeypatch.setattr("ostinato.worlds.rollout.rollout_server._MOST_MEMBERS", 3)
    async with site(tmp_path, body_bytes=2000) as at, at.worker() as gateway:
        big = CHAT | {"messages": [{"role": "user", "content": "x" * 3000}]}
        assert (await at.says(gateway, "POST", "/v1/chat/completions", big, OWN))[0] == 413
        for n in range(3):
            for _ in range(2):
                await gateway.model(f"w1.0.{n}.0", group="w1.0", harness="h").ask(ASK, max_tokens=8)
        with pytest.raises(BadRequest, match="has 3 rollouts"):
            await gateway.model("w1.0.9.0", group="w1.0", harness="h").ask(ASK, max_tokens=8)
        await gateway.model("w1.1.0.0", group="w1.1", harness="h").ask(ASK, max_tokens=8)


@pytest.mark.parametrize("field", ["certificate", "key", "authority"])
def test_files_that_are_none_are_named(tmp_path, field):
    authority = Authority(tmp_path)
    signed = authority.sign("a")
    good = {"certificate": signed.certificate, "key": signed.key, "authority": authority.file}
    (tmp_path / "nonsense").write_text("nonsense")
    for wrong in ("", str(tmp_path / "missing"), str(tmp_path / "nonsense")):
        for context, where in ((door_context, "worlds.door"), (worker_context, "worlds.connect")):
            with pytest.raises(BadConfig, match=rf"{where}\.(certificate and {where}\.key|{field})"):
                context(**good | {field: wrong})


async def test_a_turn_that_others_push_out_of_the_cache_meanwhile_is_still_its_workers(monkeypatch):
    monkeypatch.setattr(rollout_server, "_CACHED_TURNS", 1)
    log = MemoryLog()
    rows = [replace(a_turn(f"t{n}"), arm=Arm.WORLD, episode=f"acme/e{n}", group="acme/g") for n in range(4)]
    await log.append(*rows)
    turns = OwnTurns(log)
    await turns.groups("acme", ["t0"])
    find, went_on = log.find, asyncio.Event()

    async def slowly(kind, identities):
        if identities == [("t1",)]:
            await went_on.wait()
        return await find(kind, identities)

    monkeypatch.setattr(log, "find", slowly)
    waiting = asyncio.create_task(turns.groups("acme", ["t0", "t1"]))
    await asyncio.sleep(0)
    await turns.groups("acme", ["t2", "t3"])  # pushes t0 out
    went_on.set()
    assert await waiting == {"t0": "acme/g", "t1": "acme/g"}
