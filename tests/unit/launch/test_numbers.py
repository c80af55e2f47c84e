"""What `GET /metrics` tells an operator about workers, alarms and the disk."""

import asyncio
import json
import shutil
from collections import namedtuple
from dataclasses import asdict
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.deadlines import PATIENT_S

from ostinato.core.errors import Unavailable
from ostinato.core.notices import Alarm, AlarmState
from ostinato.launch.views import numbers
from ostinato.launch.views.numbers import RunNumbers, watch_alarms
from ostinato.record.log import SqlLog
from ostinato.status.worker_status import WorkerStatus

NOW = 100_000.0
TRAIN = WorkerStatus(
    name="train",
    pid=711,
    condition="failed",
    since=NOW - 7_200,
    doing="taking step 12",
    doing_since=NOW - 34,
    trouble="Unavailable: the bucket is away",
    restarts=2,
    reason=None,
    reason_at=None,
)
SERVE = WorkerStatus(**asdict(TRAIN) | {"name": "serve", "condition": "running", "trouble": None, "restarts": 0})


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numbers, "wall_clock", lambda: NOW)
    usage = namedtuple("Usage", "total used free")(100, 58, 42)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    return tmp_path / "workers.json"


def page(of: RunNumbers) -> set[str]:
    registry = CollectorRegistry()
    registry.register(of)
    return {line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")}


def test_each_worker_its_restarts_and_its_trouble(board: Path):
    workers = [asdict(SERVE), asdict(TRAIN)]
    board.write_text(json.dumps({"at": NOW - 3, "pid": 1, "ended": None, "workers": workers}))
    assert page(RunNumbers(board)) == {
        "ostinato_disk_free_bytes 42.0",
        "ostinato_up_heard_seconds 3.0",
        'ostinato_worker_running{worker="serve"} 1.0',
        'ostinato_worker_running{worker="train"} 0.0',
        'ostinato_worker_trouble{worker="serve"} 0.0',
        'ostinato_worker_trouble{worker="train"} 1.0',
        'ostinato_worker_doing_seconds{worker="serve"} 34.0',
        'ostinato_worker_doing_seconds{worker="train"} 34.0',
        'ostinato_worker_restarts_total{worker="serve"} 0.0',
        'ostinato_worker_restarts_total{worker="train"} 2.0',
    }


@pytest.mark.parametrize("left", [None, "{", json.dumps({"at": NOW, "pid": 1, "ended": "stopped", "workers": []})])
def test_without_a_supervisor_nothing_is_said_of_workers(board: Path, left: str | None):
    if left is not None:
        board.write_text(left)
    assert page(RunNumbers(board)) == {"ostinato_disk_free_bytes 42.0"}


def test_a_disk_that_cannot_be_asked_costs_its_own_number_alone(board: Path, monkeypatch: pytest.MonkeyPatch):
    def gone(path: Path) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", gone)
    of = RunNumbers(board)
    of.alarms.add("weights:live")
    assert page(of) == {'ostinato_alarm{name="weights:live"} 1.0'}


async def test_an_alarm_is_a_metric_while_it_stands(board: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(numbers, "_ALARM_POLL_S", 0.01)
    of = RunNumbers(board)

    async def until(names: set[str]) -> None:
        async with asyncio.timeout(PATIENT_S):
            while of.alarms != names:
                await asyncio.sleep(0.01)

    def alarm(number: int, name: str, state: AlarmState) -> Alarm:
        return Alarm(id=f"{name}:{number}", name=name, state=state, reason="", at=1.0)

    with SqlLog.open(tmp_path / "log") as log:
        await log.append(alarm(1, "a", AlarmState.RAISED), alarm(1, "b", AlarmState.RAISED))
        watching = asyncio.create_task(watch_alarms(log, of.alarms))
        await until({"a", "b"})
        assert {'ostinato_alarm{name="a"} 1.0', 'ostinato_alarm{name="b"} 1.0'} <= page(of)
        await log.append(alarm(2, "a", AlarmState.CLEARED))
        await until({"b"})
        await log.append(alarm(3, "a", AlarmState.RAISED))
        await until({"a", "b"})
        tried = asyncio.Event()

        def away() -> int:
            tried.set()
            raise Unavailable("the disk is away")

        with monkeypatch.context() as patched:
            patched.setattr(log, "newest", away)
            await tried.wait()
        await log.append(alarm(4, "a", AlarmState.CLEARED))
        await until({"b"})
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
