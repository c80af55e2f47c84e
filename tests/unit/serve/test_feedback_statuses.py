"""What feedback is told: what became of each event."""

import asyncio

import pytest
from gateway_world import ADMIN, Gone, HeldLog, eventually, world
from tests.deadlines import PATIENT_S
from tests.virtual_time import in_virtual_time

from ostinato.core.records import Quarantine, Reward
from ostinato.core.verdicts import RESERVED
from ostinato.testing.log import MemoryLog

EVENT = {"id": "s1", "target": "chatcmpl-x", "name": "accepted", "value": True, "source": "human"}


async def served(w):
    _, _, body = await w.chat()
    return body["ostinato"]["turns"][0]


async def test_feedback_is_durable_idempotent_and_named():
    async with world() as w:
        turn = await served(w)
        event = EVENT | {"target": turn.removesuffix(":0")}
        assert (await w.post("/v1/feedback", event))[::2] == (202, {"id": "s1", "status": "accepted"})
        w.now += 1
        assert (await w.post("/v1/feedback", event))[::2] == (202, {"id": "s1", "status": "repeated"})
        (signal,) = w.log.signals()
        assert (signal.turn, signal.value, signal.received_at) == (turn, 1.0, 1000.0)
        status, _, body = await w.post("/v1/feedback", [event | {"id": "s2"}, event | {"id": "s3", "value": "x"}])
        assert (status, body["error"]["param"]) == (400, "[1].value")
        assert len(w.log.signals()) == 1, "nothing of a bad list is taken"
        w.log.full = True
        assert (await w.post("/v1/feedback", event | {"id": "s4"}))[0] == 507


async def test_what_is_left_of_a_disk_is_for_turns():
    async with world(least_free_mb=100.0) as w:
        turn = await served(w)
        event = EVENT | {"target": turn}
        w.room = 99_000_000
        status, _, body = await w.post("/v1/feedback", event)
        assert (status, body["error"]["code"]) == (507, "storage_full")
        assert "serve.least_free_mb" in body["error"]["message"]
        assert (await w.chat())[0] == 200
        w.room = 101_000_000
        assert (await w.post("/v1/feedback", event))[0] == 202


async def test_an_event_about_an_unknown_turn_is_early_and_kept():
    async with world() as w:
        assert await w.feedback("chatcmpl-nothing") == "early"
        assert w.log.signals()[0].turn == "chatcmpl-nothing:0"


@pytest.mark.parametrize(
    "change", [{"value": False}, {"name": "rejected"}, {"target": "other:0"}, {"comment": "c"}, {"source": "llm"}]
)
async def test_other_content_under_the_same_id_is_told_and_the_first_stays(change):
    async with world() as w:
        turn = await served(w)
        await w.feedback(turn)
        w.now += 1
        assert await w.feedback(**({"target": turn} | change)) == "changed"
        (signal,) = w.log.signals()
        assert (signal.turn, signal.name, signal.value) == (turn, "accepted", 1.0)


async def test_when_it_happened_counts_only_if_it_was_said():
    async with world() as w:
        turn = await served(w)
        assert await w.feedback(turn, occurred_at=5.0) == "accepted"
        w.now += 1
        assert await w.feedback(turn, occurred_at=5.0) == "repeated"
        assert await w.feedback(turn, occurred_at=6.0) == "changed"
        assert await w.feedback(turn) == "repeated"


@pytest.mark.parametrize("decision", [Reward, Quarantine])
async def test_feedback_after_the_decision_is_late_and_kept(decision):
    more = {"value": 1.0, "function": "f@1", "signals": ()} if decision is Reward else {"reason": "reward_failed"}
    async with world() as w:
        turn, other = await served(w), await served(w)
        await w.log.append(decision(turn=turn, at=1.0, **more))
        assert await w.feedback(turn) == "late"
        assert await w.feedback(other, id="s2") == "accepted"
        w.now += 1
        assert await w.feedback(turn) == "repeated"
        assert len(w.log.signals()) == 2


async def test_a_retraction_says_whether_it_found_what_it_takes_back():
    async with world() as w:
        turn = await served(w)
        assert await w.feedback(turn, id="r0", value=None, retracts="s1") == "early"
        assert await w.feedback(turn, id="s1") == "accepted"
        assert await w.feedback(turn, id="r1", value=None, retracts="s1") == "retracted"


async def test_a_list_is_answered_event_by_event():
    async with world() as w:
        turn = await served(w)
        events = [
            EVENT | {"target": turn},
            EVENT | {"target": turn},
            EVENT | {"target": turn, "value": False},
            EVENT | {"id": "s2"},
            EVENT | {"id": "s3", "target": turn, "value": None, "retracts": "s1"},
        ]
        status, _, body = await w.post("/v1/feedback", events)
        assert status == 202
        assert [(each["id"], each["status"]) for each in body] == [
            ("s1", "accepted"),
            ("s1", "repeated"),
            ("s1", "changed"),
            ("s2", "early"),
            ("s3", "retracted"),
        ]
        _, page = await w.get("/metrics")
        for name in ("accepted", "repeated", "changed", "early", "retracted"):
            assert f'ostinato_feedback_total{{status="{name}",tenant="default"}} 1.0' in page


async def test_two_at_once_under_one_id_are_told_who_was_first():
    async with world(log=MemoryLog(delay_s=0.05)) as w:
        turn = await served(w)
        statuses = await asyncio.gather(w.feedback(turn, value=True), w.feedback(turn, value=False))
        kept = w.log.signals()[0].value
        assert len(w.log.signals()) == 1
        assert statuses == (["accepted", "changed"] if kept == 1.0 else ["changed", "accepted"])


async def test_a_served_turn_is_known_without_a_look_into_the_log_and_after_a_restart():
    class Counting(MemoryLog):
        looked = 0

        async def find(self, kind, identities):
            self.looked += kind.__name__ == "Turn"
            return await super().find(kind, identities)

    log = Counting()
    async with world(log=log) as w:
        turn = await served(w)
        assert await w.feedback(turn) == "accepted"
        assert log.looked == 0
    async with world(log=log, session_rebuild_rows=0) as w:
        assert await w.feedback(turn, id="s2") == "accepted"
        assert await w.feedback(turn, id="s3") == "accepted"
        assert log.looked == 1


async def test_names_are_bounded_in_number():
    async with world() as w:
        for i in range(50):
            await w.feedback("x", id=f"s{i}", name=f"name{i}")
        _, page = await w.get("/metrics")
        assert page.count("ostinato_feedback_signals_total{") == 33  # 32 names and "other"
        assert 'ostinato_feedback_signals_total{name="other",tenant="default"} 18.0' in page


async def test_a_sender_that_leaves_is_heard_all_the_same():
    log, gone = HeldLog(), Gone()
    async with world(log=log, real=True, wrap=gone.wrap) as w:
        task = asyncio.create_task(w.feedback("x"))
        await asyncio.wait_for(log.asked.wait(), PATIENT_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        log.go.set()
        await eventually(log.signals)


@in_virtual_time
async def test_a_log_that_hangs_is_a_clear_answer():
    log = MemoryLog(delay_s=0.5)
    async with world(log=log, store_timeout_s=0.05) as w:
        status, headers, body = await w.post("/v1/feedback", EVENT)
        assert (status, headers["retry-after"]) == (503, "1")
        assert "same ids" in body["error"]["message"]
        await eventually(log.signals)


@pytest.mark.parametrize("name", sorted(RESERVED))
async def test_only_an_operator_speaks_for_a_simulated_world(name):
    async with world(admin_keys=[ADMIN]) as w:
        event = EVENT | {"target": await served(w), "name": name, "source": "code"}
        status, _, body = await w.post("/v1/feedback", [EVENT | {"id": "s0"}, event])
        assert status == 401
        assert name in body["error"]["message"]
        assert w.log.signals() == [], "nothing of the list is taken"
        squatter = EVENT | {"target": event["target"], "id": f"{name}:{event['target']}"}
        status, _, body = await w.post("/v1/feedback", squatter)
        assert (status, w.log.signals()) == (401, []), "nobody takes the place of its own events"
        assert "ids that begin" in body["error"]["message"]
        status, _, _ = await w.post("/v1/feedback", event, headers={"X-Ostinato-Key": ADMIN})
        assert (status, w.log.signals()[0].name) == (202, name)
