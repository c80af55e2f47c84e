"""The workers of a run on several machines, each with a disk of its own: what they are given and told, and what a failure costs."""

import asyncio
import contextlib
import json
import sys

import pytest
from tests.deadlines import PATIENT_S
from tests.fakes.nodes import LIMITS, PROGRAM, Nodes, until

from ostinato.app.server_loans import read_draining
from ostinato.app.storage import home
from ostinato.compute.ledger import OperationLedger
from ostinato.config import load
from ostinato.launch.commands import up
from ostinato.launch.commands.compute import ShareController, write_requested
from ostinato.launch.commands.up import Crew
from ostinato.launch.placing import ray_cluster
from ostinato.launch.placing.supervision import Supervisor
from ostinato.status.gateway_address import read_address
from ostinato.status.worker_status import read_board

KEYS = {
    "api_keys": "acme:sk-0123456789abcdef",
    "user_keys": "acme:us-0123456789abcdef",
    "admin_key": "ad-0123456789abcdef",
}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(ray_cluster, "POLL_S", 0.05)
    monkeypatch.setattr(up, "_POLL_S", 0.05)
    monkeypatch.setattr(up, "BOARD_INTERVAL_S", 0.1)
    monkeypatch.setattr(ray_cluster, "own_command", lambda *words: (sys.executable, "-S", "-c", PROGRAM, *words))


def configured(tmp_path):
    return load(
        None,
        [
            f"run.directory='{tmp_path / 'up'}'",
            "learn.source='both'",
            f"supervise.stop_s={PATIENT_S}",
            f"serve.api_keys=['{KEYS['api_keys']}']",
            f"serve.user_keys=['{KEYS['user_keys']}']",
            f"serve.admin_key='{KEYS['admin_key']}'",
        ],
    )


class Running:
    """A crew that is kept, its cluster, and what was said."""

    def __init__(self, tmp_path, config=None):
        self.config = config or configured(tmp_path)
        self.place, self.said = home(self.config), []
        self.nodes = Nodes(disks=tmp_path / "disks")
        self.crew = Crew(self.config, self.place, self.nodes, lambda who, what: self.said.append((who, what)))
        self.supervisor = Supervisor(self.crew.workers, LIMITS, lambda *_: None)

    def disk_of(self, name):
        return next(node.disk for node in self.nodes.made if node._inner._worker and node._inner._worker.name == name)

    def worker(self, name):
        return next(worker for worker in self.crew.workers if worker.name == name)


@contextlib.asynccontextmanager
async def running(tmp_path, config=None):
    run = Running(tmp_path, config)
    tasks = asyncio.create_task(run.supervisor.run()), asyncio.create_task(run.crew.keep(run.supervisor))
    try:
        await until(lambda: all(worker.was_ready for worker in run.crew.workers))
        run.keeping = tasks[1]
        yield run
    finally:
        tasks[1].cancel()
        run.supervisor.stop()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_the_gateways_node_knows_of_the_workers_and_of_what_drains(tmp_path):
    async with running(tmp_path) as run:
        disk = run.disk_of("serve")
        board = await until(lambda: read_board(disk / "workers.json"))
        assert {worker.name for worker in board.workers} == {"serve", "train", "release", "housekeeping"}
        run.place.draining.write_text("http://b:8000\n")
        await until(lambda: read_draining(disk / "draining") == {"http://b:8000"})
        newer = await until(lambda: (found := read_board(disk / "workers.json")) and found.at > board.at and found)
        assert {worker.condition for worker in newer.workers} == {"running"}
        run.place.draining.unlink()
        await until(lambda: read_draining(disk / "draining") == frozenset())
        assert not (run.disk_of("train") / "workers.json").exists()


async def test_a_node_has_the_keys_that_its_worker_needs_and_no_more(tmp_path):
    async with running(tmp_path) as run:
        write_requested(run.place.scale, 1)
        await until(lambda: len(run.crew.workers) == 5 and run.worker("rollout").was_ready)
        everywhere = {
            name: "".join(path.read_text() for path in run.disk_of(name).glob("*config*.json"))
            for name in ("serve", "train", "release", "housekeeping", "rollout")
        }
        assert all(json.loads(text)["run"] for text in everywhere.values())
        holding = {name for name, text in everywhere.items() if any(key in text for key in KEYS.values())}
        assert holding == {"serve"}
        assert all(key in everywhere["serve"] for key in KEYS.values())
        assert {name for name in everywhere if (run.disk_of(name) / "admin.key").exists()} == {
            "serve",
            "release",
            "rollout",
        }


async def test_a_worker_that_comes_later_has_the_key_that_the_gateway_started_with(tmp_path):
    config = configured(tmp_path)
    config = config.model_copy(update={"serve": config.serve.model_copy(update={"admin_key": None})})
    async with running(tmp_path, config) as run:
        key = (run.disk_of("serve") / "admin.key").read_text()
        (run.place.root / "admin.key").unlink()
        write_requested(run.place.scale, 1)
        await until(lambda: len(run.crew.workers) == 5 and run.worker("rollout").was_ready)
        assert (run.disk_of("rollout") / "admin.key").read_text() == key
        assert not (run.place.root / "admin.key").exists()


async def test_workers_that_share_a_directory_have_each_the_settings_that_are_theirs(tmp_path):
    run = Running(tmp_path)
    run.nodes._disks = None
    starting = [asyncio.create_task(run.supervisor.run())]
    try:
        await until(lambda: all(worker.was_ready for worker in run.crew.workers))
        assert KEYS["api_keys"] in run.place.config.read_text()
        assert KEYS["api_keys"] not in (run.place.root / "config-train.json").read_text()
    finally:
        run.supervisor.stop()
        await asyncio.gather(*starting)


async def test_what_fails_is_said_once_and_the_rest_goes_on(tmp_path, monkeypatch):
    wrong = [True]

    def read(path):
        if wrong[0]:
            raise RuntimeError("a wish that nobody can read")
        return 2

    monkeypatch.setattr(up, "read_requested", read)
    async with running(tmp_path) as run:
        (run.disk_of("serve") / "serving").write_text("http://0.0.0.0:8321")
        url = await until(lambda: run.crew.serving.url)
        await until(lambda: read_address(run.disk_of("release") / "gateway.url") == url)
        failed = [what for who, what in run.said if who == "up"]
        assert failed == ["scaling failed and is tried again: RuntimeError: a wish that nobody can read"]
        wrong[0] = False
        await until(lambda: len(run.crew.workers) == 6)
        assert not run.keeping.done()


async def test_this_machines_commands_find_the_gateway_and_its_own_file_stays(tmp_path):
    async with running(tmp_path) as run:
        (run.disk_of("serve") / "serving").write_text("http://0.0.0.0:8321")
        url = await until(lambda: run.crew.serving.url)
        await until(lambda: read_address(run.place.address) == url)
        run.place.address.unlink()
        await until(lambda: read_address(run.place.address) == url)


async def test_all_who_ask_a_gateway_that_moved_are_told_at_the_same_time(tmp_path):
    """Each may take as long to end as the next: one after the other they would wait for all before them."""
    run = Running(tmp_path)
    run.crew.serving.url = "http://10.0.0.9:1"
    began, everybody = [], asyncio.Event()

    class Slow:
        node = "10.0.0.9"

        def __init__(self, name):
            self.name = name

        async def tell(self, url, grace_s):
            began.append(self.name)
            if len(began) == 5:
                everybody.set()
            await everybody.wait()

    run.crew.workers = [run.crew.serving, *(Slow(f"rollout-{number}") for number in range(5))]
    async with asyncio.timeout(PATIENT_S):
        await run.crew._tell(run.supervisor)
    assert len(began) == 5


async def test_a_worker_leaves_a_node_that_is_taken_away_before_it_is_gone(tmp_path):
    async with running(tmp_path) as run:
        worker, others = run.worker("release"), {each.name: each.pid for each in run.crew.workers}
        first = worker.node
        run.nodes.taken.add(worker.node_name)
        await until(lambda: worker.pid and worker.node != first)
        assert ("release", f"leaves {first}, which Ray removes") in run.said
        assert {each.name for each in run.crew.workers if each.pid != others[each.name]} == {"release"}
        watched = next(each for each in run.supervisor.watched if each.worker is worker)
        assert watched.reason == "was killed by SIGTERM", "it was told to end, and not cut off"


async def test_sampling_that_has_too_little_gets_workers_and_too_much_loses_them(tmp_path):
    spent = iter([OperationLedger(decode=1, backward=2), OperationLedger(decode=6, backward=2)])
    async with running(tmp_path) as run:
        compute = run.config.compute.model_copy(update={"share": 0.5, "most_workers": 3})
        sharing = ShareController(run.config.model_copy(update={"compute": compute}), lambda *_: None, spent.__next__)
        write_requested(run.place.scale, 1)
        await until(lambda: rollouts(run) == {"rollout"})
        assert await sharing.look() == 2
        await until(lambda: rollouts(run) == {"rollout", "rollout-2"} and run.worker("rollout-2").was_ready)
        assert await sharing.look() == 1
        await until(lambda: rollouts(run) == {"rollout"})


def rollouts(run):
    return {worker.name for worker in run.crew.workers if worker.name.startswith("rollout")}


@pytest.mark.parametrize(("words", "threads"), [([], 1), (["ray.cpus={serve=3.5}"], 3), (["engine.threads=2"], 2)])
def test_an_engine_on_a_node_takes_no_more_cores_than_are_reserved_for_it(words, threads):
    assert up._with_reserved_threads(load(None, words)).engine.threads == threads
