"""What was measured on this machine is kept: whatever becomes of the files, a figure costs at most a measurement, and processes agree."""

import json
import os
import threading
from dataclasses import dataclass

import pytest
from pydantic import TypeAdapter

from ostinato.app import machine
from ostinato.app.machine import PLACE, cores, forget, measured, places
from ostinato.config import load
from ostinato.launch.commands.demo import empty
from ostinato.record.roles import hold


@dataclass(frozen=True)
class Figure:
    name: str
    parts: tuple[float, ...]


@pytest.fixture
def ask(tmp_path):
    """Ask for a figure as a new process would, in `where`; returns it. `ask.times`: how often it was measured."""

    def call(value=1.5, where=(tmp_path / "cache",), form=Figure, **parts):
        machine._KNOWN.clear()

        def measure():
            call.times += 1
            return Figure(name="speed", parts=(value,)) if form is Figure else value

        return measured(where, "speed", parts, measure, form)

    call.times = 0
    return call


def test_a_second_start_reads_what_the_first_one_measured(ask, tmp_path):
    first = ask(1.5)
    assert ask(2.5) == first
    assert (first.value, ask.times) == (Figure(name="speed", parts=(1.5,)), 1)
    assert first.file.parent == tmp_path / "cache"
    assert first.at > 0


def test_one_process_goes_on_with_what_it_found_first(tmp_path):
    found = measured([tmp_path], "speed", {}, lambda: 1, int)
    found.file.unlink()
    assert measured([tmp_path], "speed", {}, lambda: 2, int) == found


def test_another_key_is_another_figure(ask, monkeypatch):
    found = [ask(1.0), ask(2.0, model="a"), ask(3.0, model="b")]
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2_VNNI")
    found.append(ask(4.0))
    monkeypatch.setattr(machine, "cores", lambda: 99)
    found.append(ask(5.0))
    monkeypatch.setattr(machine, "_code", lambda: "another kernel")
    found.append(ask(6.0))
    monkeypatch.setattr(machine, "_version", lambda name: "another library")
    found.append(ask(7.0))
    assert [each.value.parts[0] for each in found] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


def damaged(text):
    kept = json.loads(text)
    yield ""
    yield text[: len(text) // 2]
    yield "[" * 100_000
    yield json.dumps(kept | {"format": 0})
    yield json.dumps(kept | {"parts": {**kept["parts"], "cores": 1000}})
    yield json.dumps(kept | {"value": {"name": "speed", "parts": ["fast"]}})
    yield json.dumps(kept | {"value": {"name": "speed"}})
    yield json.dumps(kept | {"at": "yesterday"})
    yield " " * (1 << 20) + text


def test_a_damaged_file_is_measured_again_and_replaced(ask):
    first = ask(1.0)
    for number, text in enumerate(damaged(first.file.read_text())):
        first.file.write_text(text)
        found = ask(float(number))
        assert (found.value.parts, found.file) == ((float(number),), first.file), text[:80]
        assert ask(-1.0) == found


def test_a_link_or_a_pipe_is_never_followed(ask, tmp_path):
    first = ask(1.0)
    elsewhere = tmp_path / "elsewhere.json"
    first.file.rename(elsewhere)
    first.file.symlink_to(elsewhere)
    assert ask(2.0).value.parts == (2.0,)
    assert json.loads(elsewhere.read_text())["value"]["parts"] == [1.0]
    first.file.unlink()
    os.mkfifo(first.file)
    assert ask(3.0).value.parts == (3.0,)


def test_another_users_file_is_not_believed(ask, monkeypatch):
    ask(1.0)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    real = os.fstat

    def owned(descriptor):
        values = list(real(descriptor))
        values[4] = 54321
        return os.stat_result(values)

    monkeypatch.setattr(os, "fstat", owned)
    assert ask(2.0).value.parts == (2.0,)


def test_a_cache_that_cannot_be_written_costs_a_measurement_or_is_replaced_by_the_next_place(ask, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    found = ask(1.0, where=(blocked / "machine",))
    assert (found.value.parts, found.file) == ((1.0,), None)
    assert ask(2.0, where=(blocked / "machine",)).value.parts == (2.0,)
    found = ask(3.0, where=(blocked / "machine", tmp_path / "run"))
    assert found.file.parent == tmp_path / "run"
    assert ask(4.0, where=(blocked / "machine", tmp_path / "run")) == found


def test_a_line_says_that_nothing_can_be_kept(ask, tmp_path, caplog):
    ask(1.0)
    assert not caplog.records
    (tmp_path / "file").write_text("in the way")
    ask(1.0, where=(tmp_path / "file" / "machine",))
    (said,) = caplog.messages
    assert f"cannot be kept in {tmp_path / 'file' / 'machine'}" in said
    assert "model.cache" in said


def test_a_kept_figure_that_makes_no_sense_is_measured_again_and_replaced(tmp_path):
    def ask(value):
        machine._KNOWN.clear()
        return measured([tmp_path], "speed", {}, lambda: value, int, usable=lambda found: found > 0)

    kept_by_another_process(tmp_path, -1)
    assert ask(2).value == 2
    assert ask(3).value == 2


def test_what_does_not_last_is_measured_again_after_an_hour(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(machine, "wall_clock", lambda: now)

    def ask(value):
        machine._KNOWN.clear()
        return measured([tmp_path], "speed", {}, lambda: value, int, lasting=lambda found: found > 9).value

    assert (ask(1), ask(2)) == (1, 1), "the processes of one start agree"
    now += 3601.0
    assert (ask(3), ask(4)) == (3, 3)
    now += 3601.0
    assert ask(10) == 10
    now += 3601.0
    assert ask(11) == 10


def test_without_links_the_file_is_written_all_the_same(ask, monkeypatch):
    def no_links(*_):
        raise PermissionError("no links here")

    monkeypatch.setattr(os, "link", no_links)
    assert ask(1.0).file.is_file()
    assert ask(2.0).value.parts == (1.0,)


def kept_by_another_process(where, value):
    full = json.loads(json.dumps(machine.machine()))
    machine._write([where / machine._name("speed", full)], full, TypeAdapter(int), value, lambda *_: True)


def test_whoever_writes_first_wins(tmp_path):
    def measure():
        kept_by_another_process(tmp_path, 1)
        return 2

    assert measured([tmp_path], "speed", {}, measure, int).value == 1


def test_processes_that_start_together_measure_once(tmp_path):
    found = []

    def ask():
        found.append(measured([tmp_path], "speed", {}, lambda: pytest.fail("measured"), int).value)

    with hold(tmp_path, "speed"):  # another process measures
        asking = threading.Thread(target=ask)
        asking.start()
        kept_by_another_process(tmp_path, 1)
    asking.join()
    assert found == [1]


def test_what_was_kept_can_be_forgotten(ask, tmp_path):
    ask(1.0)
    forget([tmp_path / "cache", tmp_path / "nowhere"])
    assert ask(2.0).value.parts == (2.0,)


def test_nothing_is_left_beside_the_figures(ask, tmp_path):
    ask(1.0)
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".json", ".lock"]


def test_the_places_are_the_users_cache_and_a_run_that_is_there(tmp_path):
    words = [f"model.cache={tmp_path / 'cache'}", f"run.directory={tmp_path / 'run'}"]
    assert places(load(None, words)) == (tmp_path / "cache" / "machine",)
    (tmp_path / "run").mkdir()
    assert places(load(None, words)) == (tmp_path / "cache" / "machine", tmp_path / "run" / "machine")


def test_the_users_cache_is_where_its_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = [f"run.directory={tmp_path / 'run'}"]
    assert places(load(None, words)) == (tmp_path / "ostinato" / "machine",)


def test_a_demo_keeps_the_figures_of_its_run(tmp_path):
    (tmp_path / PLACE).mkdir()
    (tmp_path / "log").mkdir()
    empty(tmp_path)
    assert (tmp_path / PLACE).is_dir()
    assert not (tmp_path / "log").exists()


def test_the_machine_says_what_its_figures_depend_on():
    found = machine.machine()
    assert json.loads(json.dumps(found)) == found == machine.machine()
    assert 1 <= cores() <= os.cpu_count()
    assert found["libraries"]["torch"] != "none"
