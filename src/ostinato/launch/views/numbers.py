"""Prometheus metrics of a run's workers, alarms and disk, beside the gateway's own on `GET /metrics`. No tenant sees them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ostinato.core.clock import wall_clock
from ostinato.core.errors import OstinatoError
from ostinato.core.notices import Alarm, AlarmState
from ostinato.launch.placing.worker_status import read_board
from ostinato.record.rowlog import RowLog

_LOOK_S = 5.0


class RunNumbers(Collector):
    """Reads the supervisor's board and the disk at each scrape. `watch_alarms` keeps the raised alarms' names in `alarms`."""

    def __init__(self, board: Path) -> None:
        self._board = board
        self.alarms: set[str] = set()

    def collect(self) -> Iterable[Metric]:
        """The metric families of one scrape."""
        standing = GaugeMetricFamily("ostinato_alarm", "1 for each active alarm in the log.", labels=["name"])
        for name in sorted(self.alarms):
            standing.add_metric([name], 1.0)
        yield standing
        free = shutil.disk_usage(self._board.parent).free
        yield GaugeMetricFamily(
            "ostinato_disk_free_bytes", "Free bytes on the disk of the run's directory.", value=free
        )
        yield from self._workers()

    def _workers(self) -> Iterable[Metric]:
        board, now = read_board(self._board), wall_clock()
        if board is None or board.ended is not None:
            return
        yield GaugeMetricFamily(
            "ostinato_up_heard_seconds", "Seconds since the last sign of life of `ostinato up`.", value=now - board.at
        )
        running = GaugeMetricFamily("ostinato_worker_running", "1 while the worker runs.", labels=["worker"])
        troubled = GaugeMetricFamily(
            "ostinato_worker_trouble", "1 while it waits for a disk or a store.", labels=["worker"]
        )
        doing = GaugeMetricFamily(
            "ostinato_worker_doing_seconds", "Seconds in its current activity.", labels=["worker"]
        )
        restarts = CounterMetricFamily("ostinato_worker_restarts", "Number of restarts.", labels=["worker"])
        for worker in board.workers:
            running.add_metric([worker.name], float(worker.condition == "running"))
            troubled.add_metric([worker.name], float(worker.trouble is not None))
            doing.add_metric([worker.name], max(0.0, now - worker.doing_since))
            restarts.add_metric([worker.name], worker.restarts)
        yield from (running, troubled, doing, restarts)


async def watch_alarms(log: RowLog, standing: set[str]) -> None:
    """Until cancelled, keep the names of the raised alarms in `standing`. A failed read of the log is tried again later."""
    cursor = 0
    while True:
        with contextlib.suppress(OstinatoError):
            newest = await asyncio.to_thread(log.newest)
            async for _, row in log.read(cursor, {Alarm}):
                if isinstance(row, Alarm):
                    (standing.add if row.state is AlarmState.RAISED else standing.discard)(row.name)
            cursor = newest  # rows appended meanwhile are read twice, in order, which changes nothing
        await asyncio.sleep(_LOOK_S)
