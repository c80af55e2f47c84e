"""`ostinato worlds build` keeps all tasks of a package in one split."""

import io

import pytest
from rich.console import Console
from tests.fakes.tiny_package import tiny_sdist
from tests.fakes.weak_package import weak_sdist

from ostinato.core.errors import BadRequest
from ostinato.launch.commands.worlds import tasksets as command
from ostinato.worlds.building.config import BuildConfig
from ostinato.worlds.building.package_build import PackageBuild
from ostinato.worlds.building.runs import BuildPlace


class Backend:
    async def isolation(self):
        return None

    async def close(self):
        pass


async def test_a_package_cannot_be_in_two_splits(tmp_path, monkeypatch):
    ran = []

    async def run(self, _progress):
        ran.append((self.tree.name, self.split.value))
        raise BadRequest("enough for this test", field="package")

    monkeypatch.setattr(PackageBuild, "run", run)
    place = BuildPlace(backend=Backend(), python="", workdir="", layers=tmp_path, cache=tmp_path)
    monkeypatch.setattr(command, "open_build_place", lambda *_: place)
    paths = []
    for name, data in (
        ("tiny.tar.gz", tiny_sdist()),
        ("weak.tar.gz", weak_sdist()),
        ("tiny_again.tar.gz", tiny_sdist()),
    ):
        (tmp_path / name).write_bytes(data)
        paths.append(str(tmp_path / name))
    out = io.StringIO()
    with pytest.raises(BadRequest, match="no package gave a task"):
        await command.build_tasks(
            paths[:1], paths[1:], tmp_path / "out.jsonl", tmp_path, BuildConfig(), Console(file=out, width=500)
        )
    assert ran == [("tiny-counts", "train"), ("weak-shapes", "held_out")]
    assert "tiny-counts is already used for training; name a package for one split only" in out.getvalue()
