"""A worker on a node, without a cluster: the node's side in this process, and a place that comes late, is taken away, or falls silent."""

import asyncio
import contextlib
import os
import signal
import sys

import pytest

from ostinato.core.errors import Unavailable
from ostinato.launch.placing.address import read_address, write_address
from ostinato.launch.placing.judging import Limits
from ostinato.launch.placing.nodes import keeper as keeper_module
from ostinato.launch.placing.nodes import placed
from ostinato.launch.placing.nodes.keeper import NodeKeeper, Order
from ostinato.launch.placing.nodes.placed import PlacedWorker, reachable
from ostinato.launch.placing.supervision import Condition, Supervisor

PROGRAM = """
import json, os, signal, sys, time
pipe, home = int(os.environ["OSTINATO_PULSE_FD"]), os.path.dirname(sys.argv[-1])
while not os.path.exists(os.path.join(home, "fail")):
    os.write(pipe, json.dumps({"doing": "working", "ready": True}).encode() + b"\\n")
    time.sleep(0.02)
os.write(pipe, json.dumps({"doing": "x", "failed": "BadConfig: no such model", "certain": True}).encode() + b"\\n")
sys.exit(2)
"""
LIMITS = Limits(silence_s=5.0, stop_s=2.0, tries=3, window_s=60.0, longest_wait_s=0.05)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(placed, "EVERY_S", 0.05)
    monkeypatch.setattr(keeper_module, "own_command", lambda *words: (sys.executable, "-S", "-c", PROGRAM, *words))


class Node:
    """A place in this process. `there`: set once there is one; `gone`: its node was lost."""

    def __init__(self, host="10.0.0.7"):
        self.keeper, self._inner = self, NodeKeeper(host)
        self.there, self.gone, self.left = asyncio.Event(), False, False

    def wanting(self):
        return "waiting for room"

    def leave(self):
        self.left = True

    def _check(self):
        if self.gone:
            raise Unavailable("its node is gone")

    async def start(self, order):
        await self.there.wait()
        return await self._inner.start(order)

    async def look(self):
        self._check()
        return await self._inner.look()

    async def tell(self, url):
        self._check()
        await self._inner.tell(url)

    async def stop(self, grace_s):
        self._check()
        return await self._inner.stop(grace_s)

    async def kill(self):
        self._check()
        await self._inner.kill()


class Nodes:
    """Opens a new node at each wish, ready at once unless told otherwise."""

    def __init__(self, *, ready=True):
        self.made, self._ready = [], ready

    def open(self):
        node = Node(f"10.0.0.{len(self.made) + 1}")
        if self._ready:
            node.there.set()
        self.made.append(node)
        return node


def order(home):
    return Order(
        name="train", command="train", settings='{"a": "secret"}', home=str(home), admin_key="k" * 43, cwd=str(home)
    )


@contextlib.asynccontextmanager
async def supervised(worker):
    said = []
    supervisor = Supervisor([worker], LIMITS, lambda who, what: said.append(what))
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor.watched[0], said
    finally:
        supervisor.stop()
        await asyncio.gather(running, return_exceptions=True)


async def until(ask, timeout_s=15):
    async with asyncio.timeout(timeout_s):
        while not (found := ask()):
            await asyncio.sleep(0.01)
        return found


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_worker_without_a_node_says_what_it_waits_for_and_is_not_taken_for_hung(tmp_path):
    nodes = Nodes(ready=False)
    worker = PlacedWorker("train", order(tmp_path), nodes.open, lambda *_: None)
    async with supervised(worker) as (watched, _):
        await until(lambda: worker.sign and worker.sign.doing == "waiting for room")
        assert (worker.pid, worker.node) == (0, "")
        nodes.made[0].there.set()
        await until(lambda: worker.was_ready)
        assert worker.node == "10.0.0.1"
        assert alive(worker.pid)
        assert watched.restarts == 0
    assert not alive(worker.pid)
    assert nodes.made[0].left


async def test_a_wish_for_a_node_can_be_given_up(tmp_path):
    nodes = Nodes(ready=False)
    async with supervised(PlacedWorker("train", order(tmp_path), nodes.open, lambda *_: None)) as (watched, said):
        await until(lambda: nodes.made)
    assert not [what for what in said if "killed" in what]
    assert watched.condition is Condition.STOPPED
    assert nodes.made[0].left


async def test_files_of_the_run_are_put_on_the_node_for_its_owner_only(tmp_path):
    home = tmp_path / "run"
    worker = PlacedWorker("train", order(home), Nodes().open, lambda *_: None)
    async with supervised(worker):
        await until(lambda: worker.was_ready)
        for name, text in {"admin.key": "k" * 43, "config.json": '{"a": "secret"}'}.items():
            assert (home / name).read_text() == text
            assert (home / name).stat().st_mode & 0o077 == 0


async def test_a_lost_node_is_nobodys_failure_and_another_one_is_asked_for(tmp_path):
    nodes, placed_at = Nodes(), []
    worker = PlacedWorker("train", order(tmp_path), nodes.open, lambda _, what: placed_at.append(what))
    async with supervised(worker) as (watched, _):
        for lost in range(LIMITS.tries + 2):
            await until(lambda lost=lost: worker.node == f"10.0.0.{lost + 1}")
            pid = worker.pid
            nodes.made[lost].gone = True
            await until(lambda lost=lost: len(nodes.made) == lost + 2)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # here nobody else does
        assert watched.condition is not Condition.FAILED
        assert watched.reason == "its node is gone"
    assert len(placed_at) >= LIMITS.tries + 2


async def test_its_own_failure_comes_back_as_it_said_it(tmp_path):
    worker = PlacedWorker("train", order(tmp_path), Nodes().open, lambda *_: None)
    async with supervised(worker) as (watched, _):
        await until(lambda: worker.was_ready)
        (tmp_path / "fail").touch()
        await until(lambda: watched.condition is Condition.FAILED)
        assert watched.reason == "BadConfig: no such model"
        assert watched.restarts == 0


async def test_a_killed_worker_is_started_again(tmp_path):
    worker = PlacedWorker("train", order(tmp_path), Nodes().open, lambda *_: None)
    async with supervised(worker) as (watched, _):
        await until(lambda: worker.was_ready)
        first = worker.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: worker.pid not in (0, first))
        assert "SIGKILL" in watched.reason


async def test_who_asks_the_gateway_is_told_where_it_is_and_starts_again_where_it_moved(tmp_path):
    worker = PlacedWorker("release", order(tmp_path), Nodes().open, lambda *_: None)
    async with supervised(worker) as (watched, _):
        await until(lambda: worker.was_ready)
        await worker.tell("http://10.0.0.9:1", 2.0)
        await until(lambda: read_address(tmp_path / "gateway.url") == "http://10.0.0.9:1")
        first = worker.pid
        await worker.tell("http://10.0.0.9:1", 2.0)
        assert worker.pid == first
        await worker.tell("http://10.0.0.8:1", 2.0)
        await until(lambda: read_address(tmp_path / "gateway.url") == "http://10.0.0.8:1")
        assert worker.pid != first
        assert watched.restarts == 1


async def test_a_gateways_own_address_is_passed_on(tmp_path):
    worker = PlacedWorker("serve", order(tmp_path), Nodes().open, lambda *_: None)
    async with supervised(worker):
        await until(lambda: worker.was_ready)
        write_address(tmp_path / "gateway.url", "http://0.0.0.0:8321")
        await until(lambda: worker.url == "http://10.0.0.1:8321")
    assert worker.url is None


@pytest.mark.parametrize(
    ("url", "node", "expected"),
    [
        ("http://0.0.0.0:1", "10.0.0.7", "http://10.0.0.7:1"),
        ("http://[::]:1", "fd00::7", "http://[fd00::7]:1"),
        ("http://10.1.1.1:1", "10.0.0.7", "http://10.1.1.1:1"),
        ("http://127.0.0.1:1", "10.0.0.7", "http://127.0.0.1:1"),
    ],
)
def test_a_gateway_that_listens_everywhere_is_at_its_nodes_address(url, node, expected):
    assert reachable(url, node) == expected
