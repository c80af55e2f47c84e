"""What the page is told of a run: by its log, its store and its workers' lines."""

import asyncio
import io
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from rich.console import Console
from tests.deadlines import PATIENT_S
from tests.fakes.observed_run import NOW, Observed

from ostinato.app.storage import open_log, open_run
from ostinato.config import load
from ostinato.core.errors import Conflict, NotFound, Unavailable
from ostinato.core.notices import Alarm, AlarmState
from ostinato.core.records import Arm, Batch, Holdback, PolicyVersion, ReleaseEvent, Reward
from ostinato.launch.commands.release import accept_alarm, show_alarms
from ostinato.launch.views.page import RunActions
from ostinato.launch.views.screen import arms_table
from ostinato.status.index_queries import IndexQueries, TurnQuery
from ostinato.status.release_evidence import carried
from ostinato.status.releases import LedgerEvent
from ostinato.status.run_state import troubles, workers
from ostinato.status.training_state import PublishedLine, SwapLine, TrainLines, followers
from ostinato.status.worker_status import WorkerBoard, WorkerStatus
from ostinato.testing.records import a_signal, a_turn
from ostinato.weights.version.content import version_ref


@pytest.fixture
def seen(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}", "learn.batch=32", "serve.control_share=0.2"])
    with open_run(config) as run, open_log(config) as log:
        made = Observed(run, log)
        yield made
        made.facts.close()


async def test_an_empty_run_has_dashes_and_no_zeros_that_nobody_measured(seen):
    run = await seen.facts.now()
    assert (run.pace, run.last, run.arms, run.accounts.oldest_wait, run.refs) == (None, None, (), None, {})
    assert (run.accounts.ingested, run.accounts.waiting, run.batch, run.accounts.balanced) == (0, 0, 32, True)
    assert run.troubles == ("`ostinato up` is not running: a worker that exits is not restarted.",)
    assert run.warnings == ()
    assert (await seen.facts.weights()).published == ()
    assert (await seen.facts.learning()).series == ()
    await seen.fill()
    assert (await seen.facts.turns(TurnQuery())).rows == ()
    assert (await seen.facts.releases(None)).rows == ()
    assert await seen.facts.turn("none", None) is None
    assert await seen.facts.release("0" * 10) is None


async def test_several_tenants_whose_users_nobody_proves_are_warned_of(tmp_path):
    keys = '["acme:ka-0123456789abcdef", "bolt:kb-0123456789abcdef"]'
    config = load(None, [f"run.directory={tmp_path / 'run'}", f"serve.api_keys={keys}"])
    with open_run(config) as run, open_log(config) as log:
        made = Observed(run, log)
        assert "reward.users" in (await made.facts.now()).warnings[0]
        made.facts.close()


async def test_the_facts_of_a_run_are_its_logs(seen):
    live, control = a_turn("a:0", ended_at=900.0), a_turn("b:0", user="bob", ended_at=950.0)
    policy = await seen.publish(0, "live")
    await seen.fill(
        live,
        control,
        a_signal(live, at=901.0),
        a_signal(control, "undone", at=951.0),
        Reward(turn="a:0", value=1.0, function="copilot@1", signals=("x",), at=960.0),
        Batch(step=5, turns=("a:0",), credits=((0.25, 0.25),), reference=policy, at=961.0),
        Holdback(turn="b:0", reason="finish:abort", at=961.0),
        ReleaseEvent(id="r", action="shipped", policy=policy, previous=None, reason="start", detail={"n": 1}, at=1.0),
        Alarm(id="1", name="coverage:acme", state=AlarmState.RAISED, reason="silence", at=970.0),
    )
    run = await seen.facts.now()
    accounts = run.accounts
    assert (accounts.ingested, accounts.trained, accounts.held, run.signals, run.step) == (
        2,
        1,
        {"finish:abort": 1},
        2,
        5,
    )
    assert run.refs["live"] == policy
    assert [alarm.name for alarm in run.alarms] == ["coverage:acme"]
    assert [(arm.arm, arm.point.turns, arm.point.acceptance) for arm in run.arms] == [("live", 1, 1.0)]
    listed = await seen.facts.turns(TurnQuery())
    assert [(line.turn.id, line.row.value, line.row.reason, line.row.step, line.signals) for line in listed.rows] == [
        ("b:0", None, "finish:abort", None, ("undone",)),
        ("a:0", 1.0, None, 5, ("accepted",)),
    ]
    detail = await seen.facts.turn("a:0", "default")
    assert (detail.function, detail.advantage, detail.line.row.step) == ("copilot@1", 0.25, 5)
    assert detail.sampled == (b"\x07", b"\x09")
    assert await seen.facts.turn("a:0", "acme") is None
    release = await seen.facts.release(policy.hash[:12])
    assert (release.live, release.kept, release.events[0][1]) == (policy, True, {"n": 1})


async def test_those_who_follow_training_are_a_share_and_an_arm_of_their_own(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}", "serve.control_share=0.2", "serve.learner_share=0.05"])
    with open_run(config) as run, open_log(config) as log:
        made = Observed(run, log)
        step = await made.publish(3, "learner")
        live, follows = a_turn("a:0", ended_at=900.0), a_turn("b:0", arm=Arm.LEARNER, ended_at=900.0)
        rewards = [
            Reward(turn=t.id, value=v, function="f@1", signals=("x",), at=960.0)
            for t, v in ((live, 1.0), (follows, -1.0))
        ]
        await made.fill(live, follows, *rewards)
        now = await made.facts.now()
        made.facts.close()
    assert {arm: round(share, 9) for arm, share in now.shares.items() if share} == {"control": 0.2, "learner": 0.04}
    assert now.refs["learner"] == step
    assert [(arm.arm, arm.point.acceptance) for arm in now.arms] == [("live", 1.0), ("learner", 0.0)], "not live's"
    assert arms_table(now.arms, "arm", "now").row_count == 2


async def test_a_second_look_reads_only_what_is_new_and_one_look_serves_all(seen):
    await seen.fill(a_turn("a:0"))
    first = await seen.facts.now()
    await seen.fill(a_turn("b:0"), a_turn("c:0"))
    assert await seen.facts.now() is first
    seen.now += 2.0
    assert (await seen.facts.now()).accounts.ingested == 3
    assert (await seen.facts.now()).pace == pytest.approx(1.0)
    seen.now += 100.0
    again = await seen.facts.now()
    assert (again.accounts.ingested, again.pace) == (3, None)


async def test_a_clock_that_is_set_back_stops_no_look(seen):
    await seen.fill(a_turn("a:0"))
    assert (await seen.facts.now()).accounts.ingested == 1
    await seen.fill(a_turn("b:0"))
    seen.now -= 3_600.0
    again = await seen.facts.now()
    assert (again.at, again.accounts.ingested) == (seen.now, 2)
    await seen.fill(a_turn("c:0"), a_turn("d:0"))
    seen.now += 2.0
    assert (await seen.facts.now()).pace == pytest.approx(1.0)


async def test_who_looks_keeps_no_thread_from_whatever_else_the_process_does(seen, monkeypatch):
    await seen.fill(a_turn("a:0"))
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    go, threads = threading.Event(), set()
    found = IndexQueries.turns

    def slow(questions, query):
        threads.add(threading.current_thread())
        assert go.wait(PATIENT_S)
        return found(questions, query)

    monkeypatch.setattr(IndexQueries, "turns", slow)
    looking = [asyncio.create_task(seen.facts.turns(TurnQuery())) for _ in range(6)]
    try:
        async with asyncio.timeout(PATIENT_S):
            while not threads:
                await asyncio.sleep(0)
            assert await asyncio.to_thread(lambda: "at once") == "at once"
    finally:
        go.set()
    assert [len((await each).rows) for each in looking] == [1] * 6
    assert len(threads) <= 2
    seen.facts.close()
    with pytest.raises(Unavailable, match="the page is closed"):
        await seen.facts.turns(TurnQuery())
    for thread in threads:
        await asyncio.to_thread(thread.join, PATIENT_S)
    assert not any(thread.is_alive() for thread in threads)


async def test_a_turn_that_is_not_in_the_index_yet_is_shown_all_the_same(seen):
    await seen.fill()
    await seen.run.log.append(a_turn("late:0"))
    assert (await seen.facts.turn("late:0", "default")).line.row.step is None
    assert await seen.facts.turn("late:0", "acme") is None


async def test_ship_and_rollback_are_the_command_lines_and_expect_what_was_seen(seen):
    zero, one = await seen.publish(0, "live"), await seen.publish(1)
    acts = RunActions(seen.run)
    await seen.fill(ReleaseEvent(id="0", action="shipped", policy=zero, previous=None, reason="", detail={}, at=1.0))
    with pytest.raises(Conflict, match="is live now, which is not what the page showed"):
        await acts.ship(one.hash, one.hash, "why", "ann")
    with pytest.raises(NotFound):
        await acts.ship("ab" * 32, zero.hash, "why", "ann")
    assert "v1@" in await acts.ship(one.hash, zero.hash, "it is better", "ann")
    with pytest.raises(Conflict):
        await acts.roll_back(zero.hash, "why", "ann")
    assert "live again" in await acts.roll_back(one.hash, "it was not", "bob")
    await seen.fill()
    found = await seen.facts.releases(None)
    assert (found.live, found.counts) == (zero, {"shipped": 2, "rolled_back": 1})
    assert {line.reason for line in found.rows} == {"it was not"}
    told = (await seen.facts.release(one.hash)).events
    assert [(event.action, carried["actor"]) for event, carried in told] == [("rolled_back", "bob"), ("shipped", "ann")]


async def test_a_rollback_from_the_page_takes_back_what_was_seen_and_nothing_that_went_live_since(seen, monkeypatch):
    zero, one = await seen.publish(0, "live"), await seen.publish(1)
    acts = RunActions(seen.run)
    look, looked = acts._releases, asyncio.Event()

    async def releases(expected):
        found = await look(expected)
        looked.set()
        return found

    monkeypatch.setattr(acts, "_releases", releases)

    def shipped(policy, previous):
        return ReleaseEvent(
            id=f"{policy}", action="shipped", policy=policy, previous=previous, reason="", detail={}, at=1.0
        )

    await seen.fill(shipped(zero, None))
    store = seen.run.store
    await store.move_ref("live", await store.read_ref("live"), await store.read_ref(version_ref(one.hash)))

    async def write():
        await looked.wait()
        await asyncio.sleep(0.1)  # while the rollback waits for the event of what is live
        await seen.run.log.append(shipped(one, zero))

    writing = asyncio.create_task(write())
    with pytest.raises(Conflict, match=r"v1@.* is live now, not v0@"):
        await acts.roll_back(zero.hash, "v0 is bad", "ann")
    await writing
    assert (await seen.run.follower.resolve("live")) == one


async def test_what_waits_is_approved_or_refused_from_the_page_and_expects_what_was_seen(seen):
    zero, one, two = await seen.publish(0, "live"), await seen.publish(1), await seen.publish(2)
    acts = RunActions(seen.run)

    def event(number, action, policy):
        return ReleaseEvent(
            id=str(number), action=action, policy=policy, previous=zero, reason="why", detail={}, at=float(number)
        )

    await seen.fill(event(0, "shipped", zero), event(1, "awaits_approval", one))
    assert (await seen.facts.release(one.hash)).awaits
    assert not (await seen.facts.release(zero.hash)).awaits
    with pytest.raises(Conflict, match="is live now, which is not what the page showed"):
        await acts.approve(one.hash, one.hash, "why", "ann")
    with pytest.raises(NotFound, match="does not wait for approval"):
        await acts.approve(two.hash, zero.hash, "why", "ann")
    assert "never ships by itself" in await acts.refuse(one.hash, zero.hash, "no", "bob")
    await seen.fill(event(3, "awaits_approval", two))
    assert "is live" in await acts.approve(two.hash, zero.hash, "yes", "ann")
    await seen.fill()
    assert not (await seen.facts.release(two.hash)).awaits
    told = (await seen.facts.release(one.hash)).events
    assert [(event.action, carried.get("actor")) for event, carried in told] == [
        ("blocked", "bob"),
        ("awaits_approval", None),
    ]


def test_only_a_supervisor_that_is_there_says_what_workers_do():
    worker = WorkerStatus(
        name="train",
        pid=7,
        condition="failed",
        since=900.0,
        doing="",
        doing_since=900.0,
        trouble=None,
        restarts=2,
        reason="BadConfig: no such module",
        reason_at=900.0,
    )
    board = WorkerBoard(at=NOW, pid=1, ended=None, workers=(worker,))
    assert troubles(board, NOW) == ("The train worker is down and is not restarted: BadConfig: no such module.",)
    stalled = replace(
        worker, name="serve", condition="running", reason="its event loop stood still", reason_at=NOW - 30
    )
    said = troubles(replace(board, workers=(stalled,)), NOW)
    assert said == ("The serve worker was started again, 2 times so far: its event loop stood still.",)
    assert troubles(replace(board, at=NOW + 900, workers=(stalled,)), NOW + 900) == ()
    assert [each.name for each in workers(board, NOW)] == ["train"]
    assert workers(board, NOW + 60) == ()
    assert "was killed or hangs" in troubles(board, NOW + 60)[0]
    assert troubles(None, NOW)


def test_steps_that_were_taken_again_count_once(tmp_path, seen):
    path = tmp_path / "train.jsonl"
    lines = [
        {"kind": "step", "at": 1.0, "step": 1, "reward_mean": 0.1, "ess": True},
        {"kind": "step", "at": 2.0, "step": 2, "reward_mean": 0.2},
        {"kind": "step", "at": 3.0, "step": 2, "reward_mean": 0.3},
        {"kind": "unknown", "at": 3.0},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    read = TrainLines(path, tmp_path / "serve.jsonl").look()
    assert read._steps[-1]["reward_mean"] == 0.3
    from ostinato.status.training_state import _points

    steps = {int(line["step"]): line for line in read._steps}
    assert _points(steps, "reward_mean") == ((1.0, 0.1), (2.0, 0.3))
    assert _points(steps, "ess") == ()


def test_figures_that_are_no_numbers_are_not_drawn(tmp_path, seen):
    path = tmp_path / "train.jsonl"
    path.write_text('{"kind": "step", "step": 1, "loss": NaN}\n{"kind": "step", "step": 2, "loss": 0.5}\n')
    read = TrainLines(path, tmp_path / "serve.jsonl").look()
    from ostinato.status.training_state import _points

    assert _points({int(line["step"]): line for line in read._steps}, "loss") == ((2.0, 0.5),)


def test_lines_that_come_while_others_are_shown_disturb_nobody(tmp_path):
    train, serve = tmp_path / "train.jsonl", tmp_path / "serve.jsonl"
    shown = TrainLines(train, serve)
    line = {"kind": "swapped", "slot": "live", "number": 1, "pause_s": 0.1, "streams": 0, "at": 1.0}
    serve.write_text(json.dumps(line) + "\n")
    shown.look()

    class Slow(dict):
        """A line during whose reading another viewer's thread reads on."""

        def __getitem__(self, key):
            with serve.open("a") as file:
                file.write(json.dumps(line) + "\n")
            shown.look()
            return super().__getitem__(key)

    shown._swaps.append(Slow(line))
    assert [each.number for each in shown.swaps()] == [1, 1]


def test_a_number_that_was_published_again_is_wanted_from_then_on():
    def published(hash, at):
        return PublishedLine(number=8, hash=hash, form="delta", bytes=1, full_bytes=2, seconds=0.1, at=at)

    swap = SwapLine(slot="evaluation", number=8, pause_s=0.001, streams=0, at=503.0)
    (found,) = followers([swap], {}, [published("new", 500.0), published("old", 100.0)], [], 510.0)
    assert found.lag_s == 3.0


def test_a_follower_has_what_it_loaded_last_though_the_clock_was_ahead_before():
    def swapped(number, at):
        return SwapLine(slot="live", number=number, pause_s=0.001, streams=0, at=at)

    wanted = PolicyVersion(number=8, hash="8")
    (live,) = followers([swapped(8, 500.0), swapped(7, 9_000.0)], {"live": wanted}, [], [], 510.0)
    assert (live.number, live.behind) == (8, False)


def test_a_follower_lags_from_the_release_until_it_has_loaded():
    def a_policy(number):
        return PolicyVersion(number=number, hash=f"{number:064x}")

    def swapped(slot, number, at):
        return SwapLine(slot=slot, number=number, pause_s=0.001, streams=0, at=at)

    published = PublishedLine(
        number=8, hash="8", form="delta", bytes=1, full_bytes=2, changed=None, seconds=0.1, at=500.0
    )
    shipped = LedgerEvent(
        seq=1, id="1", action="shipped", policy=a_policy(7), previous=a_policy(6), reason="", at=600.0
    )
    refs = {"live": a_policy(7), "evaluation": a_policy(8)}
    swaps = [swapped("live", 7, 602.5), swapped("live", 6, 100.0), swapped("evaluation", 7, 400.0)]
    behind, live = followers(swaps, refs, [published], [shipped], 510.0)
    assert (live.slot, live.number, live.lag_s, live.behind) == ("live", 7, 2.5, False)
    assert (behind.slot, behind.number, behind.wanted, behind.lag_s, behind.behind) == (
        "evaluation",
        7,
        a_policy(8),
        10.0,
        True,
    )
    assert followers([swapped("canary", 3, 1.0)], {}, [], [], 2.0)[0].lag_s is None


def test_details_are_cut_to_what_a_page_can_hold():
    deep = {"a": {"b": {"c": {"d": {"e": {"f": {"g": 1}}}}}}}
    detail = {"evidence": [1] * 10_000, "long": "x" * 10_000, "many": list(range(10_000)), "deep": deep}
    event = ReleaseEvent(id="r", action="x", policy=None, previous=None, reason="", detail=detail, at=1.0)
    shown = carried(event)
    assert "evidence" not in shown
    assert len(json.dumps(shown)) < 3_000


async def test_an_alarm_is_shown_with_its_turns_and_a_person_ends_it(seen):
    detail = {"observed": 0.31, "turns": ["a:0", "gone:0"]}
    raised = Alarm(id="m:1", name="monitor:edit", state=AlarmState.RAISED, reason="31%", at=970.0, detail=detail)
    await seen.fill(a_turn("a:0"), a_signal(a_turn("a:0"), at=901.0), raised)
    found = await seen.facts.alarm("monitor:edit")
    assert (found.id, found.line.standing, found.acceptable, found.detail["observed"]) == ("m:1", True, True, 0.31)
    assert [(line.turn.id, line.signals) for line in found.turns] == [("a:0", ("accepted",))]
    console = Console(file=io.StringIO(), width=160)
    await show_alarms(seen.run.config, console)
    assert "example turns: a:0, gone:0" in console.file.getvalue()
    assert "ostinato alarms accept monitor:edit" in console.file.getvalue()
    with pytest.raises(Conflict, match="anew"):
        await RunActions(seen.run).accept("monitor:edit", "m:0", "wanted", "ann")
    await accept_alarm(seen.run.config, "monitor:edit", "wanted", "ann", console)
    await seen.fill()
    assert not (await seen.facts.alarm("monitor:edit")).line.standing
    await show_alarms(seen.run.config, console)
    assert "no active alarms" in console.file.getvalue()
    assert await seen.facts.alarm("monitor:none") is None


def test_a_board_from_the_future_is_no_sign_of_life():
    board = WorkerBoard(at=5_000.0, pid=1, ended=None, workers=())
    assert board.alive(5_001.0)
    assert board.alive(4_999.0), "clocks of two machines differ a little"
    assert not board.alive(1_000.0), "it was killed, and the clock was set back"
