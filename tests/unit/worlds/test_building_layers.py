"""What is made once and found by its hash, layers and the compiled launcher: whole, whoever makes it at the same time, power cut or not."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from ostinato.core.clock import wall_clock
from ostinato.core.errors import BadConfig
from ostinato.worlds.building.package_build import write_layer
from ostinato.worlds.sandbox.launcher import compiled

FILES = {"a.py": b"x = 1\n", "sub/b.txt": b"2"}


def test_a_layer_that_another_build_finishes_meanwhile_is_its(tmp_path, monkeypatch):
    make, others = tempfile.mkdtemp, []

    def slowly(**how):
        if not others:
            others.append(None)
            others[0] = write_layer(tmp_path, "needs", FILES, compiled=False)
        return make(**how)

    monkeypatch.setattr(tempfile, "mkdtemp", slowly)
    place = write_layer(tmp_path, "needs", FILES, compiled=False)
    assert place == others[0]
    assert [each.name for each in tmp_path.iterdir()] == [place.name]
    assert {path: (place / path).read_bytes() for path in FILES} == FILES


def test_what_a_killed_build_left_is_removed_and_what_another_writes_stays(tmp_path):
    for name, written_at in ((".half-killed", wall_clock() - 7200.0), (".half-busy", wall_clock())):
        (tmp_path / name / "sub").mkdir(parents=True)
        os.utime(tmp_path / name, (written_at, written_at))
    place = write_layer(tmp_path, "needs", FILES, compiled=False)
    assert {each.name for each in tmp_path.iterdir()} == {place.name, ".half-busy"}


@pytest.mark.parametrize("files", [{"../evil": b""}, {"/tmp/evil": b""}, {"a": b"", "a/b": b""}])
def test_paths_of_a_hostile_package_write_nothing(tmp_path, files):
    with pytest.raises(BadConfig):
        write_layer(tmp_path / "layers", "evil", files, compiled=False)
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_no_utf8_stays_as_it_is(tmp_path):
    place = write_layer(tmp_path, "needs", {os.fsdecode(b"caf\xe9.txt"): b"1"}, compiled=False)
    assert os.listdir(os.fsencode(place)) == [b"caf\xe9.txt"]


@pytest.fixture
def synced(monkeypatch):
    """The contents of the files that are synced, and the names of directories."""
    found, sync = [], os.fsync

    def recorded(descriptor):
        sync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        found.append(path.name if path.is_dir() else path.read_bytes())

    monkeypatch.setattr(os, "fsync", recorded)
    return found


def test_a_layer_is_on_the_disk_before_it_has_its_name(tmp_path, synced):
    write_layer(tmp_path, "needs", FILES, compiled=False)
    assert {*FILES.values(), "sub"} <= {*synced}
    assert synced[-1] == tmp_path.name


@pytest.mark.skipif(shutil.which(os.environ.get("CC") or "cc") is None, reason="needs a C compiler, as sandboxes do")
def test_a_compiled_launcher_is_on_the_disk_before_it_has_its_name(tmp_path, synced, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = compiled("probe", {"probe.c": "int probe(void) { return 7; }\n"})
    assert synced == [made.read_bytes(), made.parent.name]
    assert made.stat().st_mode & 0o777 == 0o700
    assert [each.name for each in made.parent.iterdir()] == [made.name]
