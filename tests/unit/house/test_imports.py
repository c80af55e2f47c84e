"""What benchmarks and tests import of this repository is there: most of them are not run by `make test`."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PLACES = {"benchmarks": ROOT, "tests": ROOT, "ostinato": ROOT / "src", "ostinato_client": ROOT / "client" / "src"}


def missing(text: str) -> list[str]:
    """The modules of this repository that a source names and that are not there."""
    named = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named.append(node.module)
        elif isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
    return [name for name in named if name.split(".")[0] in PLACES and not found(name)]


def found(name: str) -> bool:
    path = PLACES[name.split(".")[0]].joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_every_module_that_is_named_is_there():
    sources = [path for folder in ("benchmarks", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 100
    assert {str(path.relative_to(ROOT)): gone for path in sources if (gone := missing(path.read_text()))} == {}


@pytest.mark.parametrize("text", ["from benchmarks.release.gone import World", "import tests.gone as gone"])
def test_a_planted_one_is_found(text):
    assert len(missing(text)) == 1
