"""Layers are written once, whoever writes them at the same time, and nothing is left beside them."""

import os
import tempfile

from ostinato.core.clock import wall_clock
from ostinato.worlds.building.package_build import write_layer

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
