"""A worker on a node, without a cluster: the node's side in this process, and a place that comes late, is taken away, or falls silent."""

import contextlib
import os
import signal
import sys

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.nodes import LIMITS, PROGRAM, Nodes, alive, order, supervised, until

from ostinato.core.errors import BadConfig
from ostinato.launch.placing import ray_cluster
from ostinato.launch.placing.ray_cluster import PlacedWorker
from ostinato.launch.placing.supervision import Condition
from ostinato.status.gateway_address import read_address


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ray_cluster, "POLL_S", 0.05)
    monkeypatch.setattr(ray_cluster, "own_command", lambda *words: (sys.executable, "-S", "-c", PROGRAM, *words))


async def test_a_worker_without_a_node_says_what_it_waits_for_and_is_not_taken_for_hung(tmp_path):
    nodes = Nodes(ready=False)
    worker = PlacedWorker("train", order(tmp_path), nodes.open, lambda *_: None)
    async with supervised(worker) as (watched, _):
        await until(lambda: worker.sign and worker.sign.trouble == "waiting for room")
        assert worker.sign.doing == "waiting for a node"
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
        for name, text in {"admin.key": "k" * 43, "config-train.json": '{"a": "secret"}'}.items():
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
            await until(lambda pid=pid: not alive(pid))  # and its parent, this process, has noticed
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
        await worker.tell("http://10.0.0.9:1", PATIENT_S)
        await until(lambda: read_address(tmp_path / "gateway.url") == "http://10.0.0.9:1")
        first = worker.pid
        await worker.tell("http://10.0.0.9:1", PATIENT_S)
        assert worker.pid == first
        await worker.tell("http://10.0.0.8:1", PATIENT_S)
        await until(lambda: read_address(tmp_path / "gateway.url") == "http://10.0.0.8:1")
        assert worker.pid != first
        assert watched.restarts == 1


async def test_what_a_node_cannot_do_is_one_workers_failure_and_not_the_end_of_the_others(tmp_path):
    """Whatever it raises: an order of another version, a defect, Ray's refusal of what the worker asks for."""

    def refusing():
        raise ValueError("Use the 'memory' keyword")

    def broken():
        return Nodes(broken=TypeError("Order() got an unexpected argument")).open()

    for open_place, why in ((refusing, "ValueError: Use the 'memory' keyword"), (broken, "TypeError: Order() got")):
        worker = PlacedWorker("train", order(tmp_path / "a"), open_place, lambda *_: None)
        other = PlacedWorker("release", order(tmp_path / "b", "release"), Nodes().open, lambda *_: None)
        async with supervised(worker, other) as ((watched, beside), _):
            await until(lambda watched=watched: watched.restarts or watched.condition is Condition.FAILED)
            assert why in watched.reason
            assert beside.condition is not Condition.FAILED


async def test_a_node_of_another_version_is_refused_by_name(tmp_path):
    nodes = Nodes()
    stale = order(tmp_path).plain() | {"version": "0.0.0", "colour": "blue"}
    with pytest.raises(BadConfig, match=r"10\.0\.0\.1 has ostinato .* `ostinato up` is 0\.0\.0"):
        await nodes.open().start(stale)
    assert not (tmp_path / "admin.key").exists()


async def test_a_full_disk_of_a_node_is_nobodys_fault(tmp_path):
    nodes = Nodes(broken=OSError(28, "No space left on device"))
    async with supervised(PlacedWorker("train", order(tmp_path), nodes.open, lambda *_: None)) as (watched, _):
        await until(lambda: watched.restarts > LIMITS.tries + 1)
        assert watched.condition is not Condition.FAILED
        assert "No space left" in watched.reason


async def test_what_is_given_to_a_worker_lies_on_its_node_wherever_it_moves(tmp_path):
    nodes = Nodes()
    worker = PlacedWorker("serve", order(tmp_path, "serve"), nodes.open, lambda *_: None)
    board, draining = tmp_path / "workers.json", tmp_path / "draining"
    async with supervised(worker):
        await until(lambda: worker.was_ready)
        nodes.made[0].full = True
        worker.give("workers.json", "one")
        worker.give("draining", "http://a:1\n")
        for _ in range(3):
            heard = worker.heard
            await until(lambda heard=heard: worker.heard > heard)
        assert not board.exists()
        assert worker.running, "a disk that refuses a file costs no gateway"
        nodes.made[0].full = False
        await until(lambda: draining.exists() and board.read_text() == "one")
        assert draining.read_text() == "http://a:1\n"
        board.unlink()
        os.kill(worker.pid, signal.SIGKILL)
        await until(lambda: len(nodes.made) == 2 and board.exists())


async def test_no_file_but_those_is_put_anywhere(tmp_path):
    node = Nodes().open()
    for name in ("admin.key", "../workers.json", "gateway.url"):
        with pytest.raises(ValueError, match="no file that the gateway reads"):
            await node.put(name, "x")
