"""Where the gateway answers, on nodes that several workers of a run share: its own word for it is not taken away by who is told."""

import os
import signal
import sys

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.nodes import PROGRAM, Nodes, order, supervised, until

from ostinato.launch.placing import ray_cluster
from ostinato.launch.placing.address import reachable, write_address
from ostinato.launch.placing.ray_cluster import PlacedWorker
from ostinato.status.gateway_address import read_address

EVERYWHERE, REACHED = "http://0.0.0.0:8321", "http://10.0.0.7:8321"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ray_cluster, "POLL_S", 0.05)
    monkeypatch.setattr(ray_cluster, "own_command", lambda *words: (sys.executable, "-S", "-c", PROGRAM, *words))


def placed_worker(home, name, nodes):
    return PlacedWorker(name, order(home, name), nodes.open, lambda *_: None)


async def looked(worker, times=3):
    for _ in range(times):
        heard = worker.heard
        await until(lambda heard=heard: worker.heard > heard)


async def test_a_gateways_own_address_is_passed_on(tmp_path):
    worker = placed_worker(tmp_path, "serve", Nodes(host="10.0.0.7"))
    async with supervised(worker):
        await until(lambda: worker.was_ready)
        write_address(tmp_path / "gateway.url", "http://10.0.0.9:1")  # by somebody else, left there
        await looked(worker)
        assert worker.url is None
        (tmp_path / "serving").write_text(EVERYWHERE)
        await until(lambda: worker.url == REACHED)
    assert worker.url is None


async def test_a_worker_beside_the_gateway_leaves_its_file_alone_and_takes_nothing_with_it(tmp_path):
    nodes = Nodes(host="10.0.0.7")
    gateway, release = placed_worker(tmp_path, "serve", nodes), placed_worker(tmp_path, "release", nodes)
    (tmp_path / "serving").write_text(EVERYWHERE)
    async with supervised(gateway, release):
        await until(lambda: gateway.url == REACHED and release.was_ready)
        await release.tell(REACHED, PATIENT_S)
        await looked(release)
        assert read_address(tmp_path / "gateway.url", gateway.pid) == EVERYWHERE
        os.kill(release.pid, signal.SIGKILL)
        await until(lambda: len(nodes.made) == 3)
        await looked(gateway)
        assert gateway.url == REACHED


async def test_a_gateway_that_another_one_overwrote_is_still_where_it_is(tmp_path):
    worker = placed_worker(tmp_path, "serve", Nodes(host="10.0.0.7"))
    (tmp_path / "serving").write_text(EVERYWHERE)
    async with supervised(worker):
        await until(lambda: worker.url == REACHED)
        write_address(tmp_path / "gateway.url", "http://10.0.0.9:1")
        await looked(worker)
        assert worker.url == REACHED


async def test_a_gateway_that_was_killed_is_not_believed_to_answer_because_somebody_was_told_of_it(tmp_path):
    nodes = Nodes(host="10.0.0.7")
    gateway, release = placed_worker(tmp_path, "serve", nodes), placed_worker(tmp_path, "release", nodes)
    (tmp_path / "serving").write_text(EVERYWHERE)
    async with supervised(gateway, release):
        await until(lambda: gateway.url == REACHED and release.was_ready)
        await release.tell(REACHED, PATIENT_S)
        await looked(release)
        (tmp_path / "serving").unlink()
        first = gateway.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: gateway.pid not in (0, first))
        await until(lambda: read_address(tmp_path / "gateway.url") == REACHED)  # whoever asks it knows it all the same
        await looked(gateway)
        assert gateway.url is None


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
