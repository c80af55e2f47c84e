"""What tests patch by name is there: a module that moved leaves a test that fails, or that patches nothing where `raising` is off."""

import ast
import importlib.util
from pathlib import Path

TESTS = Path(__file__).parents[2]
PATCHING = {"setattr", "delattr"}


def patched(text: str) -> set[str]:
    """The names in `monkeypatch.setattr("ostinato....", ...)` that stand there as they are."""
    return {
        call.args[0].value
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in PATCHING
        and call.args
        and isinstance(call.args[0], ast.Constant)
        and str(call.args[0].value).startswith("ostinato.")
    }


def module_of(parts: list[str]) -> tuple[Path, int]:
    """The file of the longest prefix that is a module, and how many parts name it. Imports none of them."""
    spec = importlib.util.find_spec(parts[0])
    file, named = Path(spec.origin), 1
    while named < len(parts):
        below = file.parent / parts[named]
        found = next((each for each in (below / "__init__.py", below.with_suffix(".py")) if each.exists()), None)
        if file.name != "__init__.py" or found is None:
            break
        file, named = found, named + 1
    return file, named


def bound(text: str) -> set[str]:
    """Every name that a module's text assigns, defines or imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
            case _:
                pass
    return found


def missing(target: str) -> str:
    """Why a target is not there; "" if it is. Beyond its module only the first name is looked up."""
    parts = target.split(".")
    file, named = module_of(parts)
    if named == len(parts) or parts[named] in bound(file.read_text()):
        return ""
    return f"{target}: {'.'.join(parts[:named])} has no {parts[named]}"


def test_every_name_that_a_test_patches_is_there():
    found = {target: path for path in sorted(TESTS.rglob("*.py")) for target in patched(path.read_text())}
    assert len(found) > 20
    assert [f"{found[target].name}: {why}" for target in found if (why := missing(target))] == []


def test_a_name_that_is_gone_is_found():
    text = "monkeypatch.setattr('ostinato.cli.commands.no_command', 1); delattr('ostinato.x')"
    assert patched(text) == {"ostinato.cli.commands.no_command"}
    assert (
        missing("ostinato.cli.commands.no_command")
        == "ostinato.cli.commands.no_command: ostinato.cli.commands has no no_command"
    )
    assert missing("ostinato.no_room.thing") == "ostinato.no_room.thing: ostinato has no no_room"
    assert missing("ostinato.worlds.sandbox.host.subprocess.Popen") == ""
