import fcntl
import os
import resource
import threading
from pathlib import Path

from tests.deadlines import PATIENT_S

from ostinato.app.numerics import NumericsMode
from ostinato.core.files import older
from ostinato.launch.views.progress import Progress
from ostinato.status.progress_lines import Lines, last_lines, numerics_line


def test_lines_that_a_kill_or_a_full_disk_tore_are_lost_alone(tmp_path):
    path = tmp_path / "serve.jsonl"
    progress, lines = Progress(path), Lines(path)
    progress.write("one")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))
        progress.write("lost")
        progress.write("lost too")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    progress.write("two")
    with path.open("a") as file:
        file.write('{"kind": "to')  # its writer was killed
    Progress(path).write("three")
    assert [line["kind"] for line in lines.new()] == ["one", "two", "three"]
    assert lines.new() == []


def test_long_files_are_set_aside_and_nobody_who_follows_misses_a_line(tmp_path):
    path = tmp_path / "train.jsonl"
    progress, lines = Progress(path, most_bytes=2_000), Lines(path)
    seen = []
    for number in range(500):
        progress.write("step", step=number)
        if number % 7 == 0:
            seen += lines.new()
    seen += lines.new()
    assert [line["step"] for line in seen] == list(range(500))
    size = sum(each.stat().st_size for each in tmp_path.iterdir())
    assert size < 2 * 2_100
    assert sorted(each.name for each in tmp_path.iterdir()) == ["train.1.jsonl", "train.jsonl"]
    fresh = [line["step"] for line in Lines(path).new()]
    assert fresh == list(range(fresh[0], 500)), "who comes late sees what is left, in order"


def test_two_processes_that_set_a_long_file_aside_at_once_lose_no_line(tmp_path, monkeypatch):
    path = tmp_path / "audit.jsonl"
    replace, flock, met = Path.replace, fcntl.flock, threading.Event()

    def others():
        other = Progress(path, most_bytes=2_000)
        for step in (2, 3):  # the first makes the file too long once more, the second begins a new one
            other.write("step", step=step)
        met.set()

    writing = threading.Thread(target=others)

    def replaced(self, target):
        if writing.ident is None:
            writing.start()
            assert met.wait(PATIENT_S)  # the other has written both, or must wait
        return replace(self, target)

    def locked(file, how):
        if threading.current_thread() is writing:
            met.set()
        flock(file, how)

    monkeypatch.setattr(Path, "replace", replaced)
    monkeypatch.setattr(fcntl, "flock", locked)
    Progress(path, most_bytes=2_000).write("step", step=1, text="x" * 2_000)
    writing.join(PATIENT_S)
    assert [line["step"] for line in Lines(path).new()] == [1, 2, 3]


def test_a_file_that_somebody_cut_is_read_from_where_it_begins_now(tmp_path):
    path = tmp_path / "train.jsonl"
    progress, lines = Progress(path), Lines(path)
    for number in range(10):
        progress.write("step", step=number)
    assert len(lines.new()) == 10
    os.truncate(path, 0)
    assert lines.new() == []
    progress.write("step", step=10)
    assert [line["step"] for line in lines.new()] == [10]


def test_what_is_no_line_is_passed_over(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\xff\xfe\n[1]\n"step"\n{"no": "kind"}\n{"kind": "step"}\n')
    assert Lines(path).new() == [{"kind": "step"}]
    assert last_lines(path) == [{"kind": "step"}]
    assert last_lines(tmp_path / "none.jsonl") == []


def test_the_last_lines_of_a_long_file_are_read_alone(tmp_path):
    path = tmp_path / "train.jsonl"
    progress = Progress(path)
    for number in range(2_000):
        progress.write("step", step=number)
    found = [line["step"] for line in last_lines(path, most_bytes=1_000)]
    assert found == list(range(found[0], 2_000))
    assert 10 < len(found) < 30
    assert not older(path).exists()


def test_only_numerics_that_could_not_be_exact_get_a_line(tmp_path):
    path = tmp_path / "serve.jsonl"
    assert numerics_line(last_lines(path)) == ""
    progress, fast = Progress(path), NumericsMode(mode="fast", why="linear 8 -> 8 gives other bits")
    for mode, line in (
        (NumericsMode(mode="exact"), ""),
        (fast, str(fast)),
        (NumericsMode(mode="fast"), ""),  # as it was set
    ):
        progress.computing(mode)
        progress.write("swapped")
        assert numerics_line(last_lines(path)) == line


def test_the_last_lines_are_found_after_the_file_was_set_aside(tmp_path):
    path = tmp_path / "train.jsonl"
    progress = Progress(path, most_bytes=2_000)
    number = 0
    while not older(path).exists():
        progress.write("step", step=number)
        number += 1
    assert not path.exists()
    assert [line["step"] for line in last_lines(path)] == list(range(number)), "the file was set aside just now"
    progress.write("step", step=number)
    assert [line["step"] for line in last_lines(path)] == list(range(number + 1))
    few = [line["step"] for line in last_lines(path, most_bytes=300)]
    assert few == list(range(few[0], number + 1))
    assert 2 < len(few) < number
