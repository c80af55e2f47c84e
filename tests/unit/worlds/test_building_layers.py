"""Layers are written once, whoever writes them at the same time, and nothing is left beside them."""

import tempfile

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
