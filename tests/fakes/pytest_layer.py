"""A layer of a world that contains pytest, as in a repository task."""

import compileall
import py_compile
import shutil
import sys
import tempfile
from functools import cache
from pathlib import Path

import _pytest
import _pytest._io.terminalwriter
import iniconfig
import packaging
import pluggy
import pygments
import pytest

SITE = ".venv/site-packages"


@cache
def pytest_layer() -> str:
    """The layer's directory, with compiled modules so that a run need not compile them."""
    root = Path(tempfile.mkdtemp(prefix="ostinato-layer-"))
    for package in (_pytest, pluggy, iniconfig, packaging, pytest):
        source = Path(package.__file__).parent
        ignored = shutil.ignore_patterns("__pycache__", "*.pyi", "licenses")
        shutil.copytree(source, root / SITE / source.name, ignore=ignored)
    shutil.copy(Path(pytest.__file__).parents[1] / "py.py", root / SITE / "py.py")
    base = Path(pygments.__file__).parents[1]
    for name in [
        name for name in sys.modules if name.split(".")[0] == "pygments"
    ]:  # only the modules that are imported here, which pytest needs too
        source = Path(sys.modules[name].__file__)
        target = root / SITE / source.relative_to(base)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(root, quiet=2, invalidation_mode=mode, stripdir=str(root))
    root.chmod(0o755)  # a sandbox runs as nobody, who must be able to read the layer
    return str(root)
