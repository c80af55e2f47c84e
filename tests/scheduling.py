"""Scheduling of the tests over worker processes: how many workers, which tests stay together, and the longest first.

`tests/durations.json` has the seconds of each long test of whole programs and of each long file of other tests. `make durations` measures
it again: it runs all tests and has this module read pytest's report (`python -m tests.scheduling REPORT.xml`).
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
DURATIONS = Path(__file__).with_name("durations.json")
PROGRAMS = "tests/e2e/"
"""Tests of whole programs wait a lot and last long: they are dealt out one by one, all others by file."""
_WORKER_GIB = 4.5  # a worker that has run all kinds of tests, and the processes of a run that it started
_PER_CORE = 2  # a worker that waits leaves its core to another
_SHORT_S = 1.0  # shorter ones are not listed
_UNKNOWN_S = 10.0  # a test of a whole program in a file of which nothing is listed: it may last long


def workers(control_groups: Path = Path("/sys/fs/cgroup"), memory: Path = Path("/proc/meminfo")) -> int:
    """The number of workers for this machine or container: two for each core that may be used, as far as the memory allows."""
    most = round(_PER_CORE * cores(control_groups))
    return int(max(1, min(most, free_gib(control_groups, memory) // _WORKER_GIB)))


def cores(control_groups: Path) -> float:
    """The cores that this process may use: its affinity and its container's quota."""
    usable = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else float(os.cpu_count() or 1)
    quota, period = (*_words(control_groups / "cpu.max"), "", "")[:2]
    return min(usable, int(quota) / int(period)) if quota.isdigit() and period.isdigit() else usable


def free_gib(control_groups: Path, memory: Path) -> float:
    """The memory in GiB that this process may still take, infinite if the system does not say."""
    words = _words(memory)
    free = float(words[words.index("MemAvailable:") + 1]) * 1024 if "MemAvailable:" in words else float("inf")
    (limit, *_), (used, *_) = (
        _words(control_groups / "memory.max") or [""],
        _words(control_groups / "memory.current") or [""],
    )
    if limit.isdigit() and used.isdigit():
        free = min(free, float(limit) - float(used))
    return free / (1 << 30)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def group(item: pytest.Item) -> str | None:
    """The tests that one worker runs together; None for a test that any worker may run by itself.

    A test of a whole program stays with the tests of its file that use the same costly fixture: one that lives longer than a test.
    """
    file = item.nodeid.partition("::")[0]
    if not file.startswith(PROGRAMS):
        return file
    definitions = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009 (pytest has no public way to ask)
    shared = [found[-1] for found in definitions if found[-1].scope != "function" and found[-1].baseid]
    if not shared:
        return None
    indices = getattr(getattr(item, "callspec", None), "indices", {})
    chosen = sorted(f"{each.argname} {indices[each.argname]}" for each in shared if each.argname in indices)
    return " ".join([file, *chosen])


def schedule(items: list[pytest.Item], durations: Mapping[str, float]) -> None:
    """Group the tests, and put the longest group first. The order within a group and among groups of the same length stays."""
    groups = [group(item) or item.nodeid for item in items]
    counts = defaultdict[str, int](int)
    for item in items:
        counts[_listed(item.nodeid)] += 1
    measured_files = {name.partition("::")[0] for name in durations}
    lengths = defaultdict[str, float](float)
    for item, name in zip(items, groups, strict=True):
        listed = _listed(item.nodeid)
        unknown = "::" in listed and listed.partition("::")[0] not in measured_files
        lengths[name] += _UNKNOWN_S if unknown else durations.get(listed, 0.0) / counts[listed]
        if name != item.nodeid:
            item.add_marker(pytest.mark.xdist_group(name))
    order = sorted(range(len(items)), key=lambda number: -lengths[groups[number]])
    items[:] = [items[number] for number in order]


def measured(report: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """The table of durations, by what `tests/durations.json` lists, of the tests in a report: class name, name, seconds."""
    found = defaultdict[str, float](float)
    for where, name, seconds in report:
        found[_listed(f"{where.replace('.', '/')}.py::{name.partition('@tests/')[0]}")] += seconds
    return {name: round(found[name], 1) for name in sorted(found) if found[name] >= _SHORT_S}


def _listed(nodeid: str) -> str:
    return nodeid if nodeid.startswith(PROGRAMS) else nodeid.partition("::")[0]


def read_durations() -> dict[str, float]:
    """Seconds by name, from `tests/durations.json`; empty if it is missing."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def main(reports: Iterable[str]) -> None:
    """Write `tests/durations.json` from reports of pytest (`--junitxml`)."""
    cases = [case for report in reports for case in ElementTree.parse(report).iter("testcase")]
    table = measured((case.get("classname", ""), case.get("name", ""), float(case.get("time", "0"))) for case in cases)
    DURATIONS.write_text(json.dumps(table, indent=0) + "\n")
    print(  # noqa: T201 (for the person who runs it)
        f"{DURATIONS.relative_to(ROOT)}: {len(table)} of {len(cases)} tests and their files"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
