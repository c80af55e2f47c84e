"""What worlds tell people through the log: cheats, and checkpoints that are only surer of less."""

from dataclasses import replace

from tests.unit.worlds.rollout.test_finished import TASK, a_record

from ostinato.app.worlds import NARROWED, note_cheats, note_coverage
from ostinato.core.notices import Alarm
from ostinato.core.records import PolicyVersion
from ostinato.testing.log import MemoryLog
from ostinato.worlds.grading.grade import Grade
from ostinato.worlds.rollout.finished import CHEATED, CheatWatch


def alarms(log) -> list[tuple[str, str]]:
    return [(row.name, row.state.value) for row in log.rows if isinstance(row, Alarm)]


async def test_a_cheat_raises_an_alarm_that_ends_once_nobody_cheats():
    log, watch = MemoryLog(), CheatWatch(quiet=3)
    honest, cheated = a_record(), a_record(grade=Grade(value=1.0, cheated=("patched the judge",)))
    for record in (honest, honest, honest, honest):
        watch.take(record)
        await note_cheats(log, watch)
    assert alarms(log) == []
    for record in (cheated, honest, cheated, honest, honest, a_record(grade=None)):
        watch.take(record)
        await note_cheats(log, watch)
    assert alarms(log) == [(CHEATED, "raised")]
    (row,) = [row for row in log.rows if isinstance(row, Alarm)]
    assert "calc-1" in row.reason
    assert "patched the judge" in row.reason
    watch.take(honest)
    await note_cheats(log, watch)
    assert alarms(log) == [(CHEATED, "raised"), (CHEATED, "cleared")]


def measured(number: int, tries, tasks=20):
    policy = PolicyVersion(number=number, hash=f"{number:02}")
    return [
        a_record(task=replace(TASK, id=f"t{n}"), grade=Grade(value=value), policies=(policy,))
        for n in range(tasks)
        for value in (tries(n) if callable(tries) else tries)
    ]


async def test_coverage_that_is_lost_raises_an_alarm_until_it_is_not():
    broad, better = [1.0, 0, 0, 0], [1.0, 1, 1, 0]
    log = MemoryLog()

    def surer(n: int):
        return [1.0] * 4 if n < 12 else [0.0] * 4

    await note_coverage(log, measured(1, broad), 4)
    assert alarms(log) == [], "one checkpoint is compared with nothing"
    await note_coverage(log, [*measured(1, broad), *measured(2, surer)], 1)
    assert alarms(log) == []
    await note_coverage(log, [*measured(1, broad), *measured(2, surer)], 4)
    assert alarms(log) == [(NARROWED, "raised")]
    await note_coverage(log, [*measured(1, broad), *measured(2, surer), *measured(3, better)], 4)
    assert alarms(log) == [(NARROWED, "raised"), (NARROWED, "cleared")]
