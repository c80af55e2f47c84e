"""What a graded program leaves behind to hold up its grader."""

import json

import pytest

from ostinato.core.sandbox import SandboxSpec
from ostinato.worlds.grading.functions import Apart, clashing
from ostinato.worlds.grading.test_report import deeper, lines_of


class Nowhere:
    """A backend that must not be asked."""

    async def start(self, spec):
        raise AssertionError("nothing can be started of this")


def nested(depth: int):
    tree: object = 1
    for _ in range(depth):
        tree = [tree]
    return tree


def test_what_is_nested_too_deep_to_be_written_again_is_no_answer():
    lines = [json.dumps(nested(3)), json.dumps(nested(900)), json.dumps(1)]
    assert lines_of(("\n".join(lines) + "\n").encode()) == [nested(3)]
    assert not deeper(nested(5), 5)
    assert deeper(nested(6), 5)
    assert deeper({"a": {"b": [1]}}, 2)


@pytest.mark.parametrize(
    ("files", "clash"),
    [
        ({"a.py": b"", "b/c.py": b""}, None),
        ({"README.md": b"", "README.md/x.py": b""}, "README.md"),
        ({"a/b/c.py": b"", "a/b": b""}, "a/b"),
    ],
)
async def test_a_path_that_would_be_file_and_directory_ends_the_run_before_it_begins(files, clash):
    spec = SandboxSpec(files=files)
    assert clashing(spec) == clash
    if clash:
        result = await Apart(backend=Nowhere(), python="python3").run("answering", spec, stdin=b"", timeout=1.0)
        assert result.code == 126
        assert clash in result.stderr.decode()


def test_layers_are_looked_at_too(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "setup.py").write_text("")
    assert clashing(SandboxSpec(layers=(str(tmp_path),), files={"setup.py/x.py": b""})) == "setup.py"
    assert clashing(SandboxSpec(layers=(str(tmp_path),), files={"pkg": b""})) == "pkg"
    assert clashing(SandboxSpec(layers=(str(tmp_path),), files={"pkg/new.py": b"", "setup.py": b""})) is None
