"""What benchmarks and tests import of this repository is there: most of them are not run by `make test`.

What a process of Ostinato loads at its start needs no package of an extra, and none that only torch's CUDA builds bring.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
OPTIONAL = {"datasketch", "e2b", "libcst", "playwright", "psycopg", "ray", "triton", "vllm"}
PLACES = {"benchmarks": ROOT, "tests": ROOT, "ostinato": ROOT / "src", "ostinato_client": ROOT / "client" / "src"}


DOTTED = re.compile(rf"(?<![\w.])(?:{'|'.join(PLACES)})(?:\.\w+)*")


def missing(text: str) -> list[str]:
    """The modules of this repository that a source names and that are not there."""
    if all(map(found, set(DOTTED.findall(text)))):  # most sources: no need to read them as Python
        return []
    named = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            named.append(node.module)
        elif isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
    return [name for name in named if name.split(".")[0] in PLACES and not found(name)]


@cache
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


def loads(text: str) -> set[str]:
    """What a source imports while it is loaded: not what its functions import, nor what only a type checker reads."""
    statements, named = list(ast.parse(text).body), set[str]()
    while statements:
        node = statements.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            named |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            statements += [*node.body, *node.orelse]
        elif isinstance(node, ast.With | ast.ClassDef):
            statements += node.body
    return named


def need_optional(sources: dict[str, str]) -> set[str]:
    """The modules that cannot be loaded without one of `OPTIONAL`, by what they import or by what that imports."""
    named = {module: loads(text) for module, text in sources.items()}
    needy = {module for module, names in named.items() if {name.split(".")[0] for name in names} & OPTIONAL}
    while more := {module for module, names in named.items() if names & needy} - needy:
        needy |= more
    return needy


def test_no_process_loads_an_optional_package_at_its_start():
    files = (ROOT / "src" / "ostinato").rglob("*.py")
    sources = {".".join(path.relative_to(ROOT / "src").with_suffix("").parts): path.read_text() for path in files}
    needy = need_optional(sources)
    assert "ostinato.model.paged_triton" in needy
    starts = ("ostinato.cli", "ostinato.launch.workers", "ostinato.launch.commands", "ostinato.app", "ostinato.engine")
    assert [name for name in sorted(needy) if name.startswith(starts)] == []


def test_a_planted_chain_is_found():
    chain = {
        "a": "import triton",
        "b": "from a import kernel",
        "c": "def f():\n    import b",
        "d": "if x:\n    import b",
    }
    assert need_optional(chain) == {"a", "b", "d"}
