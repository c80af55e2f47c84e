"""Assertions rewritten once for all workers of pytest-xdist, not once by each.

Pytest rewrites a module's assertions when it imports it, and keeps the result. In a fresh clone the workers import the same modules at the
same time, so each would rewrite nearly all of them. Instead each first rewrites a share, and finds the others' shares when it collects.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from _pytest.assertion import rewrite  # pytest has no public way to rewrite without importing
from _pytest.config import Config


def rewrite_share(config: Config) -> None:
    """In a worker of pytest-xdist: rewrite its part of the test modules that the command names, unless they are kept already."""
    given = getattr(config, "workerinput", None)
    if given is None or sys.dont_write_bytecode:
        return
    number, count = int(given["workerid"].removeprefix("gw")), given["workercount"]
    modules = named(config.args, config.getini("python_files"))
    for module in modules[number::count]:
        keep_rewritten(config, module)


def named(arguments: Iterable[str], patterns: Iterable[str]) -> list[Path]:
    """The test modules in these directories and files, sorted; what follows `::` in an argument is ignored."""
    places = [Path(argument.partition("::")[0]).absolute() for argument in arguments]
    found = {module for place in places for pattern in patterns for module in place.rglob(pattern)}
    return sorted(found | {place for place in places if place.is_file()})


def keep_rewritten(config: Config, module: Path) -> None:
    """Rewrite one module and keep the result where pytest's import looks for it. A module with an error is left to its import."""
    place = rewrite.get_cache_dir(module)
    kept = place / f"{module.stem}{rewrite.PYC_TAIL}"
    if not rewrite.try_makedirs(place) or rewrite._read_pyc(module, kept) is not None:
        return
    try:
        stat, code = rewrite._rewrite_test(module, config)
    except (OSError, SyntaxError):
        return
    rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, stat, kept)
