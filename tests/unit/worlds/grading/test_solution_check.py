"""Which tasks a rehearsal accepts, by what the runs with the solution tell: programs are scripted, nothing is run."""

import dataclasses
import json
from dataclasses import dataclass, field

import pytest

from ostinato.core.conversation import Message, Role
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.core.sandbox import ExecResult
from ostinato.worlds.grading.functions import IsolatedPrograms
from ostinato.worlds.grading.suites import PytestGrading, read_suite, rehearse
from ostinato.worlds.tasks.task import Grading, Split, Task

NEW, OLD = "test_calc.py::test_new", tuple(f"test_calc.py::test_old_{n}" for n in range(10))
EVERY = (NEW, *OLD)
SOURCE = "from calc import double\n" + "".join(
    f"def {id.partition('::')[2]}():\n    double(1)\n" for id in EVERY
)  # no claims: what the tests see is the same in every run


def task(**data):
    data = {"fail_to_pass": (NEW,), "pass_to_pass": OLD, "solution": {"calc.py": "def double(x): ..."}} | data
    grading = Grading(grader="pytest", data=data, hidden={"test_calc.py": SOURCE.encode()}, timeout_s=2.0)
    return Task(id="calc", family="f", messages=(Message(role=Role.USER, text="Mend."),), grading=grading)


def told(*failed, collected=EVERY):
    """What a run writes in which these tests fail and the others pass."""
    lines = [["collected", list(collected)]]
    for id in collected:
        lines += [["start", id], *([["failed", id]] if id in failed else []), ["end", id]]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


TIMED_OUT = None


@dataclass
class ScriptedRuns:
    """A backend whose programs write what the script says, one run after another; the last goes on for ever."""

    script: list[bytes | None]
    timeouts: list[float] = field(default_factory=list)

    async def start(self, spec):
        return self

    async def exec(self, argv, *, stdin=b"", cwd=None, env=None, timeout):
        self.timeouts.append(timeout)
        said = self.script[min(len(self.timeouts), len(self.script)) - 1]
        late = said is TIMED_OUT
        return ExecResult(
            code=-9 if late else 0,
            stdout=said or b"",
            stderr=b"",
            timed_out=late,
            killed_reason="timeout" if late else None,
            seconds=timeout,
        )

    async def stop(self):
        pass


async def rehearsed(*script, given=None):
    given = given or task()
    runs = ScriptedRuns(list(script))
    asked = PytestGrading.model_validate(dict(given.grading.data))
    return await rehearse(IsolatedPrograms(backend=runs, python="python3"), given, asked), runs.timeouts


async def test_a_solution_that_passes_everything_makes_everything_gradable():
    found, timeouts = await rehearsed(told())
    assert found.ungradable == ()
    assert set(found.solution) == set(EVERY)
    assert timeouts == [2.0] * 3, "one run of the tests as they stand, two sealed ones that agree"


async def test_a_solution_that_does_not_pass_is_named():
    with pytest.raises(
        BadConfig, match=r"solution: 1 listed tests do not pass with it, such as 'test_calc\.py::test_new'"
    ):
        await rehearsed(told(NEW))


async def test_what_fails_once_and_passes_then_is_no_fault_of_the_solution():
    found, timeouts = await rehearsed(told(NEW, OLD[0]), told(OLD[1]), told())
    assert found.ungradable == ()
    assert len(timeouts) == 4


async def test_a_test_beside_that_fails_with_the_solution_is_left_out_and_many_are_a_fault():
    found, _ = await rehearsed(told(OLD[3]))
    assert found.ungradable == (OLD[3],)
    with pytest.raises(BadConfig, match=r"2 listed tests do not pass with it, such as 'test_calc\.py::test_old_3'"):
        await rehearsed(told(OLD[3], OLD[4]))


async def test_the_deadline_that_suffices_for_the_solution_holds_for_answers():
    found, timeouts = await rehearsed(TIMED_OUT, TIMED_OUT, told())
    assert found.seconds == 8.0
    assert timeouts == [2.0, 4.0, 8.0, 8.0, 8.0]


async def test_tests_that_never_end_are_named_with_the_longest_deadline_they_had():
    with pytest.raises(BadConfig, match="timeout_s is 2, and its tests do not end within 8 s with the solution"):
        await rehearsed(TIMED_OUT)


async def test_where_nothing_is_collected_the_machine_is_asked_about_and_not_the_solution():
    for given in (task(), dataclasses.replace(task(solution={}), split=Split.CANARY)):
        with pytest.raises(Unavailable, match=r"collected nothing from test_calc\.py"):
            await rehearsed(told(collected=()), given=given)


async def test_a_task_without_a_solution_is_refused_unless_it_is_a_canary():
    with pytest.raises(BadConfig, match="only a canary may lack it"):
        read_suite(task(solution={}))
    canary = dataclasses.replace(task(solution={}), split=Split.CANARY)
    assert read_suite(canary).solution == {}
    found, timeouts = await rehearsed(told(), given=canary)
    assert (found.ids, found.solution, timeouts) == ({id: id for id in EVERY}, None, [2.0])
