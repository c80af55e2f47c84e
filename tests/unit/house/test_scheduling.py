"""Scheduling of the tests: workers by cores and memory, what stays together, longest first, and the table of durations."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests import scheduling

GIB = 1 << 30


class Item:
    """A collected test: its node id, the scope of its fixtures, and which case of each it has."""

    def __init__(self, nodeid, **fixtures):
        self.nodeid, self.marks = nodeid, []
        found = {
            name: [SimpleNamespace(argname=name, scope=scope, baseid=base)]
            for name, (scope, base, _) in fixtures.items()
        }
        self._fixtureinfo = SimpleNamespace(name2fixturedefs=found)
        chosen = {name: index for name, (_, _, index) in fixtures.items() if index is not None}
        if chosen:
            self.callspec = SimpleNamespace(indices=chosen)

    def add_marker(self, mark):
        self.marks.append(mark.args[0])


def machine(directory, available_gib, **control):
    """A directory of control groups and a file like /proc/meminfo."""
    for name, content in control.items():
        (directory / name.replace("_", ".")).write_text(content)
    memory = directory / "meminfo"
    memory.write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_gib << 20} kB\n")
    return directory, memory


@pytest.mark.parametrize(
    ("cores", "gib", "control", "expected"),
    [
        (2, 24, {}, 4),
        (2, 10, {}, 2),
        (2, 1, {}, 1),
        (1, 24, {}, 2),
        (64, 400, {"cpu_max": "200000 100000\n"}, 4),
        (64, 400, {"cpu_max": "50000 100000\n"}, 1),
        (2, 24, {"cpu_max": "max 100000\n", "memory_max": "max\n", "memory_current": "5\n"}, 4),
        (8, 400, {"memory_max": f"{16 * GIB}\n", "memory_current": f"{2 * GIB}\n"}, 3),
    ],
)
def test_workers_by_cores_and_memory(tmp_path, monkeypatch, cores, gib, control, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    assert scheduling.workers(*machine(tmp_path, gib, **control)) == expected


def test_workers_where_the_system_says_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    assert scheduling.workers(tmp_path / "none", tmp_path / "none") == 4


def test_groups_are_files_and_for_programs_what_shares_a_costly_fixture():
    ours, plugin = "tests/e2e/test_b.py", ""
    assert scheduling.group(Item("tests/unit/test_a.py::test_x[1]")) == "tests/unit/test_a.py"
    assert scheduling.group(Item("tests/e2e/test_b.py::test_x")) is None
    assert scheduling.group(Item("tests/e2e/test_b.py::test_x", own=("function", ours, None))) is None
    assert scheduling.group(Item("tests/e2e/test_b.py::test_x", other=("session", plugin, None))) is None
    assert scheduling.group(Item("tests/e2e/test_b.py::test_x", run=("module", ours, None))) == ours
    assert scheduling.group(Item("tests/e2e/test_b.py::test_x[v]", run=("module", ours, 1))) == f"{ours} run 1"


def test_schedule_puts_the_longest_group_first_and_keeps_its_order():
    run = {"run": ("module", "tests", None)}
    items = [
        Item("tests/unit/test_a.py::test_1"),
        Item("tests/unit/test_a.py::test_2"),
        Item("tests/e2e/test_b.py::test_long"),
        Item("tests/e2e/test_c.py::test_1", **run),
        Item("tests/e2e/test_c.py::test_2", **run),
        Item("tests/e2e/test_b.py::test_short"),
        Item("tests/e2e/test_new.py::test_unknown"),
    ]
    known = {
        "tests/unit/test_a.py": 7.0,
        "tests/e2e/test_b.py::test_long": 9.0,
        "tests/e2e/test_c.py::test_1": 6.0,
        "tests/e2e/test_c.py::test_2": 5.0,
    }
    scheduling.schedule(items, known)
    names = [
        *("e2e/test_c.py::test_1", "e2e/test_c.py::test_2"),  # 11 s together
        "e2e/test_new.py::test_unknown",
        "e2e/test_b.py::test_long",
        *("unit/test_a.py::test_1", "unit/test_a.py::test_2"),
        "e2e/test_b.py::test_short",
    ]
    assert [item.nodeid.removeprefix("tests/") for item in items] == names
    assert [item.marks for item in items[:5]] == [["tests/e2e/test_c.py"]] * 2 + [[], [], ["tests/unit/test_a.py"]]


def test_the_workers_of_this_run_know_the_groups(request):
    """The plugin that deals the tests out reads a group from the end of a test's name; without it each test is dealt out alone."""
    if not getattr(request.config.option, "loadgroup", False):
        return  # one process runs all
    assert request.node.nodeid.endswith("@tests/unit/house/test_scheduling.py")


def test_durations_are_listed_by_program_test_and_by_file_of_others():
    report = [
        ("tests.unit.core.test_a", "test_x[a.b]@tests/unit/core/test_a.py", 0.61),
        ("tests.unit.core.test_a", "test_y@tests/unit/core/test_a.py", 0.62),
        ("tests.e2e.test_b", "test_x[1]@tests/e2e/test_b.py run 1", 3.04),
        ("tests.e2e.test_b", "test_y", 2.0),
        ("tests.e2e.test_b", "test_short", 0.2),
    ]
    assert scheduling.measured(report) == {
        "tests/e2e/test_b.py::test_x[1]": 3.0,
        "tests/e2e/test_b.py::test_y": 2.0,
        "tests/unit/core/test_a.py": 1.2,
    }


def test_durations_are_written_from_a_report_of_pytest(tmp_path, monkeypatch, capsys):
    report = tmp_path / "report.xml"
    case = '<testcase classname="tests.e2e.test_b" name="test_y" time="2.5" />'
    report.write_text(f"<testsuites><testsuite>{case}</testsuite></testsuites>")
    monkeypatch.setattr(scheduling, "DURATIONS", tmp_path / "tests" / "durations.json")
    monkeypatch.setattr(scheduling, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    assert scheduling.read_durations() == {}
    scheduling.main([str(report)])
    assert scheduling.read_durations() == {"tests/e2e/test_b.py::test_y": 2.5}
    assert "1 of 1" in capsys.readouterr().out


def test_the_table_knows_the_tests_of_today():
    """A few may have been renamed since `make durations` measured them; if many were, the longest are no longer first."""
    table = json.loads(scheduling.DURATIONS.read_text())
    there = [name for name in table if (scheduling.ROOT / name.partition("::")[0]).is_file()]
    assert len(there) > 0.75 * len(table) > 75


def test_a_server_that_benchmarks_installed_makes_the_tests_no_longer():
    """Tests on a real vLLM server take minutes: they are examinations, whether its environment happens to be there or not."""
    files = [path for path in (scheduling.ROOT / "tests").rglob("test_*.py") if "not usable()" in path.read_text()]
    real = [path for path in files if path != Path(__file__)]
    assert len(real) >= 3
    assert [path for path in real if "pytest.mark.examination" not in path.read_text()] == []
