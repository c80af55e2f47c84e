"""kill -9 while a summary is written: of a rollout worker, whose rollout is begun anew, without half a memory, and rewarded once; and of a
gateway in the middle of a call that compacts, which its client repeats.
"""

import asyncio
import subprocess
import sys
from collections import Counter, defaultdict
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
from pydantic import SecretStr
from tests.deadlines import WHOLE_PROGRAM_S
from tests.fakes.fork_server import FORK_SERVER
from tests.oracles.turn_accounting import recount

from ostinato.core.errors import NoSignal
from ostinato.core.records import Batch, PolicyVersion, Purpose, Reward, Turn, Window, WindowMaker
from ostinato.record.log import SqlLog
from ostinato.reward.config import RewardConfig
from ostinato.reward.functions import copilot
from ostinato.reward.ledger_entries import Taught
from ostinato.reward.pipeline import RewardDesk
from ostinato.reward.runners import Inline
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

KEY = "admin-0123456789abcdef"
V0 = PolicyVersion(number=0, hash="fake0")
TASKS, GROUP = 4, 3
WORKER = f"""
import asyncio, sys
from collections import Counter
from pathlib import Path
from benchmarks.worlds.summaries import streams
from benchmarks.worlds.summaries_world import StreamReader
from ostinato.record.log import SqlLog
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.rollout.attempt import Workshop
from ostinato.worlds.rollout.config import WorldsConfig
from ostinato.worlds.harness.gateway import WorldGateway
from ostinato.worlds.rollout.groups import EventFile, SpentGroups
from ostinato.worlds.rollout.rollout_worker import Rollouts

class Turnabout:
    # every other rollout of a task is worth something, so that its group can be learned from
    def __init__(self):
        self.graded = Counter()

    async def grade(self, task, rollout):
        self.graded[task.id] += 1
        return Grade(value=float(self.graded[task.id] % 2))

async def main(url, place):
    config = WorldsConfig(file="t", group={GROUP}, groups=2, group_first=0, concurrency=3, retry_pause_s=0.01, poll_s=0.01)
    journal, events = EventFile.open(place / "rollouts.jsonl")
    log = SqlLog.open(place / "log.db")
    async with WorldGateway(url, {KEY!r}) as gateway:
        shop = Workshop(harnesses={{"stream": StreamReader()}}, backend=None, grader=Turnabout(), gateway=gateway)
        spending = SpentGroups(log, after=max((event.get("after", 0) for event in events), default=0))
        await Rollouts(streams(3, {TASKS}, (3, 3)), shop, journal, events, spending, config, lambda *_, **__: None).run()

asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
"""


class Sums(FakeEngine):
    """Two events as a summary, and a letter as an answer. Summary number `stalls_at` never comes."""

    def __init__(self, stalls_at: int) -> None:
        super().__init__(self._said, slots={"live": V0, "world": V0})
        self.sums, self.stalls_at, self.stalled = 0, stalls_at, asyncio.Event()

    def _said(self, request) -> str:
        return "A1B2" if self._sums(request) else "A"

    def _sums(self, request) -> bool:
        return decode(request.prompt_ids).rstrip("\ufffd").endswith(">")

    async def generate(self, request):
        self.sums += self._sums(request)
        if self._sums(request) and self.sums == self.stalls_at:
            self.stalled.set()
            await asyncio.Event().wait()
        async for chunk in super().generate(request):
            yield chunk


async def learning(log, over: asyncio.Event) -> None:
    config = RewardConfig(world_staleness=10**6, purposes=tuple(Purpose))
    taught = Taught(people=False, groups=2)
    desk = RewardDesk(log, Inline(copilot, max_abs=1.0), lambda: 30.0, config, taught=taught)
    while not over.is_set():
        try:
            await desk.poll()
            await desk.batch(desk.last_step + 1, 1, V0)
        except NoSignal:
            pass
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("stalls_at", [1, 5])
async def test_a_worker_killed_in_the_middle_of_a_summary_repeats_the_rollout_whole(stalls_at, tmp_path):
    log, engine, over = SqlLog.open(tmp_path / "log.db"), Sums(stalls_at), asyncio.Event()
    app = create_app(
        engine=engine,
        renderer=ByteRenderer(),
        log=log,
        config=ServeConfig(),
        clock=lambda: 20.0,
        model_name="m",
        admin_keys=[SecretStr(KEY)],
    )
    command = [sys.executable, "-c", WORKER]
    async with asyncio.timeout(WHOLE_PROGRAM_S), serving(app) as url:
        learner = asyncio.create_task(learning(log, over))
        worker = FORK_SERVER.popen([*command, url, str(tmp_path)], cwd=Path.cwd())
        await engine.stalled.wait()
        worker.kill()
        await asyncio.to_thread(worker.wait)
        worker = FORK_SERVER.popen([*command, url, str(tmp_path)], cwd=Path.cwd())
        assert await asyncio.to_thread(worker.wait) == 0
        over.set()
        await learner
    rows = [row async for _, row in log.read(0, {Turn, Reward, Batch})]
    found = await recount(log)
    log.close()
    turns = {row.id: row for row in rows if isinstance(row, Turn)}
    assert len(turns) == sum(isinstance(row, Turn) for row in rows)
    rewards = Counter(row.turn for row in rows if isinstance(row, Reward))
    trained = Counter(turn for row in rows if isinstance(row, Batch) for turn in row.turns)
    assert max(rewards.values()) == max(trained.values()) == 1
    assert found.balanced
    chains = defaultdict(list)
    for turn in turns.values():
        chains[turn.episode].append(turn)
    rewarded = {episode: chain for episode, chain in chains.items() if chain[-1].id in rewards}
    assert len(rewarded) == TASKS * GROUP, "each member of each group once"
    assert len(chains) > len(rewarded), "what was under way at the kill was torn"
    for chain in rewarded.values():
        assert [turn.purpose for turn in chain] == [Purpose.COMPACTION] * 3 + [Purpose.TASK]
        shown = [decode([token for token in turn.prompt_ids if token < 128]) for turn in chain]
        assert ["=== memory: summary ===\nA1B2\n=== end of summary ===" in text for text in shown] == [
            False,
            *[True] * 3,
        ]
    assert {turns[turn].episode for turn in trained} <= set(rewarded)


GATEWAY = f"""
import asyncio, sys
from pathlib import Path
from pydantic import SecretStr
from ostinato.record.log import SqlLog
from ostinato.serve.config import ServeConfig
from ostinato.serve.gateway import create_app
from ostinato.testing.engine import FakeEngine, decode
from ostinato.testing.renderer import ByteRenderer
from ostinato.testing.serving import serving

class Stalls(FakeEngine):
    # says that it was asked for what never comes
    def __init__(self, stalls_at):
        super().__init__(lambda request: {{"summary": "Done: the parser.", "answer": "Going on."}}[self._wanted(request)])
        self.stalls_at = stalls_at

    def _wanted(self, request):
        return "summary" if "Summarise the conversation" in decode(request.prompt_ids) else "answer"

    async def generate(self, request):
        if self._wanted(request) == self.stalls_at:
            print("stalled", flush=True)
            await asyncio.Event().wait()
        async for chunk in super().generate(request):
            yield chunk

async def main(place, stalls_at):
    app = create_app(
        engine=Stalls(stalls_at),
        renderer=ByteRenderer(),
        log=SqlLog.open(place / "log.db"),
        config=ServeConfig(compaction_least_tokens=256),
        clock=lambda: 20.0,
        model_name="m",
        admin_keys=[SecretStr({KEY!r})],
    )
    async with serving(app) as url:
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""
EDIT = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 900}}
CALL = {
    "model": "m",
    "max_tokens": 200,
    "metadata": {"user_id": "ann"},
    "context_management": {"edits": [EDIT]},
    "messages": [{"role": "user", "content": "Mend the parser. " * 60}],
}


@contextmanager
def gateway(place, stalls_at="never"):
    """A gateway in a process of its own; it is killed at the end."""
    command = [sys.executable, "-c", GATEWAY, str(place), stalls_at]
    with FORK_SERVER.popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.stdout
        finally:
            process.kill()


def ask(url, body, **headers):
    reply = httpx2.post(f"{url}/v1/messages", json=body, headers=headers, timeout=WHOLE_PROGRAM_S)
    assert reply.status_code == 200, reply.text
    return reply.json()


async def rewards(log):
    """Two desks after each other, as after a restart."""
    for _ in range(2):
        desk = RewardDesk(log, Inline(copilot, max_abs=1.0), lambda: 10_000.0, RewardConfig(purposes=tuple(Purpose)))
        for _ in range(3):
            await desk.poll()
    return Counter([row.turn async for _, row in log.read(0, {Reward})])


@pytest.mark.parametrize("stalls_at", ["summary", "answer"])
async def test_a_gateway_killed_in_a_call_that_compacts_repeats_it_once_and_finds_the_window_again(stalls_at, tmp_path):
    key = {"Idempotency-Key": "k"}
    with gateway(tmp_path, stalls_at) as (url, told):
        asking = asyncio.create_task(asyncio.to_thread(ask, url, CALL, **key))
        assert (await asyncio.to_thread(told.readline)).strip() == "stalled"
    with pytest.raises(httpx2.HTTPError):
        await asking
    with gateway(tmp_path) as (url, _):
        first, again = ask(url, CALL, **key), ask(url, CALL, **key)
        assert (first["content"], first["id"]) == (again["content"], again["id"])
        event = {"id": "s1", "target": first["id"], "name": "accepted", "value": True, "source": "human"}
        assert httpx2.post(f"{url}/v1/feedback", json=event).status_code == 202
    talk = [
        *CALL["messages"],
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "Go on."},
    ]
    with gateway(tmp_path) as (url, _):
        ask(url, CALL | {"messages": talk})
    with SqlLog.open(tmp_path / "log.db") as log:
        turns = [row async for _, row in log.read(0, {Turn})]
        given = await rewards(log)
        balanced = (await recount(log)).balanced
    summary, answer, after = turns
    assert [turn.purpose for turn in turns] == [Purpose.COMPACTION, Purpose.TASK, Purpose.TASK]
    window = Window(number=1, begins_with=summary.id, by=WindowMaker.GATEWAY)
    assert (answer.window, after.window, after.parent) == (window, window, answer.id)
    assert {turn.episode for turn in turns} == {summary.episode}
    known = answer.prompt_ids + answer.sampled_ids
    assert after.prompt_ids[: len(known)] == known
    assert (given[answer.id], max(given.values()), balanced) == (1, 1, True)
