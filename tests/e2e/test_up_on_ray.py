"""A run on a Ray cluster of three nodes: simulated users and rollouts, more rollout workers and fewer, a node that is taken away with
notice, and two that are lost.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import aiohttp
import pytest
from tests.e2e.world_runs import write_tasks
from tests.oracles.turn_accounting import recount

from ostinato.app.storage import home, open_run
from ostinato.config import load
from ostinato.core.clock import wall_clock
from ostinato.core.records import Arm, Batch, Signal, Turn
from ostinato.launch.commands.compute import write_requested
from ostinato.record.roles import hold
from ostinato.status.worker_status import read_board

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ostinato[ray]'")

CPUS = 12


@pytest.fixture
def cluster(monkeypatch):
    """A head without room for workers, and three nodes; a node is noticed to be gone after two seconds."""
    for name, value in {"period_ms": 500, "timeout_ms": 500, "failure_threshold": 3, "initial_delay_ms": 0}.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": 80 << 20})
    nodes = [made.add_node(num_cpus=CPUS, object_store_memory=80 << 20) for _ in range(3)]
    yield made, nodes
    made.shutdown()


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def run_settings(quick_settings, tmp_path, record, address):
    return [
        *quick_settings(tmp_path),
        f"listen.port={free_port()}",
        f"record.url='{record.url}'",
        f"record.namespace='{record.namespace}'",
        "record.lease_s=3",
        "record.append_s=60",
        f"weights.url='{tmp_path / 'weights'}'",
        "supervise.silence_s=120",
        "learn.source='both'",
        f"worlds.file='{write_tasks(tmp_path / 'tasks.jsonl')}'",
        "worlds.group=4",
        "worlds.groups=2",
        "worlds.epochs=0",
        "worlds.retry_pause_s=0.2",
        "evaluate.suite=''",
        "model.numerics=fast",
        f"ray.address='{address}'",
        "ray.resources={housekeeping={memory=1e8}}",
    ]


class Watching:
    """The run, as somebody who looks at it sees it."""

    def __init__(self, launched, events):
        self.launched, self.events = launched, events

    async def until(self, ask, timeout_s=180):
        async with asyncio.timeout(timeout_s):
            while not (found := ask()):
                await self.launched.during(asyncio.sleep(0.2))
            return found

    def rollouts(self):
        return {
            each.worker.name: each.worker
            for each in self.launched.supervisor.watched
            if each.worker.name.startswith("rollout") and each.worker.sign and each.worker.sign.ready
        }

    def worker(self, name):
        return self.watched(name).worker

    def watched(self, name):
        return next(each for each in self.launched.supervisor.watched if each.worker.name == name)

    async def answering(self, timeout_s=180):
        async with asyncio.timeout(timeout_s), aiohttp.ClientSession() as session:
            while True:
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    url = self.launched.address()
                    if url is not None:
                        async with session.get(f"{url}/health") as response:
                            if response.status == 200:
                                return url
                await self.launched.during(asyncio.sleep(0.2))


def node_of(nodes, pid):
    """The node whose raylet is an ancestor of this process."""
    import psutil

    above = {parent.pid for parent in psutil.Process(pid).parents()}
    return next(node for node in nodes if above & {each.process.pid for each in node.all_processes["raylet"]})


def lose(made, nodes, pid):
    """SIGKILL for the node that this process runs on, and all that is on it."""
    node = node_of(nodes, pid)
    nodes.remove(node)
    made.worker_nodes.discard(node)
    node.kill_raylet()  # SIGKILL


def take_away(name):
    """What a node does by itself when it is told to end, before it ends half a minute later."""
    import ray
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    head = ray._private.worker.global_worker.gcs_client
    accepted, why = head.drain_node(
        name, DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION, "told to end", int(1000 * wall_clock()) + 30_000
    )
    assert accepted, why


@pytest.mark.examination
async def test_a_run_on_ray_outlives_two_of_its_nodes_and_loses_no_row(
    tmp_path, cluster, in_postgres, quick_settings, simulated_users
):
    from ostinato.launch.commands.up import launch_on_ray

    made, nodes = cluster
    config = load(None, run_settings(quick_settings, tmp_path, in_postgres(), made.address))
    events, began = [], time.monotonic()

    def say(who, what):
        events.append((who, what))
        sys.stderr.write(f"{time.monotonic() - began:6.1f} {who}: {what}\n")

    with hold(home(config).root, "up"):
        async with launch_on_ray(config, say) as launched:
            seen = Watching(launched, events)
            seen.url = await seen.answering()
            async with simulated_users(seen, 6) as acked:
                await seen.until(lambda: len(seen.rollouts()) == 1 and acked.signals)
                write_requested(home(config).scale, 4)
                await seen.until(lambda: len(seen.rollouts()) == 4)
                worker, told = seen.worker("release"), "ended, as if it had been asked to"
                gone, node = worker.pid, node_of(nodes, worker.pid)
                take_away(worker.node_name)
                await seen.until(lambda: seen.watched("release").reason == told)
                nodes.append(made.add_node(num_cpus=CPUS, object_store_memory=80 << 20))
                nodes.remove(node)
                made.worker_nodes.discard(node)
                node.kill_raylet()
                await seen.until(lambda: worker.pid not in (0, gone) and len(seen.rollouts()) == 4)
                await seen.answering()
                gone = seen.worker("train").pid
                lose(made, nodes, gone)
                await seen.until(lambda: seen.worker("train").pid not in (0, gone) and len(seen.rollouts()) == 4)
                before = len(acked.turns)
                gone = seen.worker("serve").pid
                lose(made, nodes, gone)
                await seen.until(lambda: seen.worker("serve").pid not in (0, gone))
                assert await seen.answering() == seen.url
                await seen.until(lambda: len(acked.turns) > before + 20)
                await seen.until(lambda: len(seen.rollouts()) == 4)
                write_requested(home(config).scale, 1)
                await seen.until(lambda: len(seen.launched.supervisor.watched) == 5 and len(seen.rollouts()) == 1)
                before = len(acked.turns)
                await seen.until(lambda: len(acked.turns) > before + 20)
    with open_run(config) as opened:
        turns = {row.id: row async for _, row in opened.log.read(0, {Turn}) if isinstance(row, Turn)}
        signals = {row.id async for _, row in opened.log.read(0, {Signal}) if isinstance(row, Signal)}
        batches = [row async for _, row in opened.log.read(0, {Batch}) if isinstance(row, Batch)]
        found = await recount(opened.log)
    assert {turn: turns[turn].text for turn in acked.turns} == acked.turns
    assert acked.signals <= signals
    assert found.balanced, found
    taught = [turn for batch in batches for turn in batch.turns]
    assert len(taught) == len(set(taught))
    assert [batch.step for batch in batches] == list(range(1, len(batches) + 1))
    assert {turns[turn].arm for turn in taught} >= {Arm.WORLD}
    worlds = [turn for turn in turns.values() if turn.arm is Arm.WORLD]
    sys.stderr.write(
        f"acknowledged: {len(acked.turns)} turns, {len(acked.signals)} signals; {acked.failures} calls failed while nodes were lost; "
        f"{len(worlds)} turns of worlds, {len(batches)} steps\n"
    )
    assert len([what for _, what in events if "is gone" in what]) >= 2


def by_name(directory):
    board = read_board(directory / "workers.json")
    return {} if board is None else {worker.name: worker for worker in board.workers}


def healthy(url):
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever the environment says
    with contextlib.suppress(OSError), direct.open(f"{url}/health", timeout=5) as response:
        return response.status == 200
    return False


def wait_for(ask, timeout_s=180):
    until = time.monotonic() + timeout_s
    while not (found := ask()):
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.2)
    return found


@pytest.mark.examination
def test_the_command_scales_shows_nodes_and_takes_its_workers_along_even_if_it_is_killed(
    tmp_path, cluster, in_postgres, quick_settings
):
    import psutil

    made, _ = cluster
    settings = run_settings(quick_settings, tmp_path, in_postgres(), made.address)
    options = [word for each in settings for word in ("--set", each)]
    url = f"http://127.0.0.1:{load(None, settings).listen.port}"
    run = tmp_path / "run"

    def command(*words):
        return (sys.executable, "-m", "ostinato.cli", *words, *options)

    def said(*words):
        wide = os.environ | {"COLUMNS": "200"}
        return subprocess.run(command(*words), capture_output=True, text=True, check=True, timeout=60, env=wide).stdout

    def gone(pids):
        return not [pid for pid in pids if psutil.pid_exists(pid)]

    for end in (signal.SIGKILL, signal.SIGTERM):
        with (tmp_path / "up.txt").open("w") as output:
            up = subprocess.Popen(command("up", "--on", "ray"), stdout=output, stderr=output)
        try:
            wait_for(lambda: healthy(url))
            assert "1 now, 2 wanted" in wait_for(lambda: "rollout" in by_name(run) and said("scale", "rollout", "2"))
            wait_for(lambda: by_name(run).get("rollout-2") and by_name(run)["rollout-2"].pid)
            workers = by_name(run)
            assert len(workers) == 6
            assert f"running on {workers['serve'].node}" in " ".join(said("status").split())
            pids = [worker.pid for worker in workers.values()]
            up.send_signal(end)
            assert up.wait(60) == (0 if end is signal.SIGTERM else -signal.SIGKILL)
            wait_for(lambda pids=pids: gone(pids), 60)
        finally:
            up.kill()
