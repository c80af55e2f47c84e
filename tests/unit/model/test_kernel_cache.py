"""Compiled kernels are kept once per user and version: where, for whom, how many, and what damage and other writers do to them."""

import ast
import logging
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numba
import pytest
from numba.core import caching

from ostinato.model.kernels import cache

KERNELS = Path(cache.__file__).parent
PACKAGE = KERNELS.parents[1]
LINE = "compiling kernels, once for this user and version: about a minute"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user with an empty cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_notice", cache._Notice())
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    cache.directory.cache_clear()
    yield tmp_path / "cache" / "ostinato" / "kernels"
    cache.directory.cache_clear()


@pytest.fixture
def kernels(tmp_path):
    """A copy of some kernels in a clone somewhere."""
    folder = tmp_path / "clone" / "kernels"
    folder.mkdir(parents=True)
    (folder / "add.py").write_text("one")
    (folder / "sub.py").write_text("two")
    return folder


def stored(home, value="code", key="key"):
    file = cache.KernelCacheFile(str(home), "add-1.py3", "ostinato")
    file.save(key, value)
    return file


def test_another_clone_of_the_same_kernels_has_the_same_directory(home, kernels, tmp_path):
    shutil.copytree(kernels, tmp_path / "other")
    os.utime(tmp_path / "other" / "add.py", (0, 0))
    place = cache.directory(kernels)
    assert place == cache.directory(tmp_path / "other")
    assert place.parent == home
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "add.py").write_text("three"),
        lambda folder: (folder / "new.py").write_text(""),
        lambda folder: (folder / "sub.py").rename(folder / "less.py"),
    ],
    ids=["content", "file", "name"],
)
def test_a_change_of_any_kernel_gives_another_directory(kernels, change):
    before = cache.digest(kernels)
    change(kernels)
    assert cache.digest(kernels) != before


@pytest.mark.parametrize(
    ("where", "name"),
    [(numba, "__version__"), (cache.llvmlite, "__version__"), *((numba.config, switch) for switch in cache._SWITCHES)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_another_compiler_or_another_way_to_compile_gives_another_directory(kernels, monkeypatch, where, name):
    before = cache.digest(kernels)
    monkeypatch.setattr(where, name, "another")
    assert cache.digest(kernels) != before


def test_kernels_use_only_what_the_hash_covers():
    """A kernel that inlined code of another folder would be taken from the cache although that code has changed."""
    for folder in (KERNELS, PACKAGE / "weights" / "delta"):
        ours = f"ostinato.{'.'.join(folder.relative_to(PACKAGE).parts)}"
        compiled = [
            path for path in folder.glob("*.py") if "njit" in path.read_text() or "intrinsic" in path.read_text()
        ]
        assert len(compiled) > 2
        for path in compiled:
            imported = {
                node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
            }
            foreign = {name for name in imported if name.startswith("ostinato.") and not name.startswith(f"{ours}.")}
            assert foreign <= {"ostinato.core.errors"}, path


def test_every_kernel_of_the_package_is_kept_there():
    """All folders with kernels install the cache before numba sees their functions."""
    with_kernels = {
        path.parent for path in PACKAGE.rglob("*.py") if "njit(" in path.read_text() and path.parent != KERNELS
    }
    for folder in with_kernels:
        assert "ostinato.model.kernels" in (folder / "__init__.py").read_text(), folder


def test_functions_of_others_and_a_directory_that_the_user_names_are_left_to_numba(home, monkeypatch):
    def own():
        """Not a function of the package."""

    assert cache.KernelLocator.from_function(own, __file__) is None
    source = str(KERNELS / "norm.py")
    assert cache.KernelLocator.from_function(own, source).get_cache_path().startswith(str(home))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "/somewhere")
    assert cache.KernelLocator.from_function(own, source) is None


def test_a_second_installation_changes_nothing():
    before = list(caching.CacheImpl._locator_classes)
    cache.install()
    assert caching.CacheImpl._locator_classes == before
    assert before[0] is cache.KernelLocator


def test_code_in_a_directory_that_is_open_to_others_is_not_read(home, kernels):
    place = cache.directory(kernels)
    stored(place)
    place.chmod(0o770)
    cache.directory.cache_clear()
    assert cache.directory(kernels) is None


def test_code_behind_a_link_is_not_read(home, kernels, tmp_path):
    place = cache.directory(kernels)
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    cache.directory.cache_clear()
    assert cache.directory(kernels) is None


def test_code_of_somebody_else_is_not_read(home, kernels, monkeypatch):
    assert cache.directory(kernels) is not None
    cache.directory.cache_clear()
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    assert cache.directory(kernels) is None


def test_without_any_directory_kernels_compile_and_say_so(home, caplog):
    file = cache.KernelCacheFile(os.devnull, "add-1.py3", "ostinato")
    with caplog.at_level(logging.INFO):
        file.save("key", "code")
        assert file.load("key") is None
    assert "XDG_CACHE_HOME" in caplog.text


def test_a_cache_directory_that_cannot_be_made_is_replaced_by_a_temporary_one(kernels, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cache.directory.cache_clear()
    place = cache.directory(kernels)
    cache.directory.cache_clear()
    assert place.parents[1] == tmp_path / f"ostinato-{os.getuid()}"
    assert place.parents[1].stat().st_mode & 0o777 == 0o700


def test_the_version_that_was_used_longest_ago_is_removed_for_a_new_one(home, kernels):
    first = cache.directory(kernels)
    others = [home / str(number) for number in range(1, cache.KEPT)]
    for place in others:
        place.mkdir()
        os.utime(place, (4_000_000_000,) * 2)  # a clock that was ahead must not cost the newest version
    (kernels / "add.py").write_text("three")
    cache.directory.cache_clear()
    new = cache.directory(kernels)
    assert set(home.iterdir()) == {new, *others}
    assert not first.exists()


@pytest.mark.parametrize("name", ["add-1.py3.nbi", "add-1.py3.1.nbc"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04K\x01."])
def test_a_damaged_file_is_compiled_again(home, kernels, name, content):
    place = cache.directory(kernels)
    stored(place)
    (place / name).write_bytes(content)
    file = cache.KernelCacheFile(str(place), "add-1.py3", "ostinato")
    assert file.load("key") in (None, 1)
    file.save("key", "code again")
    assert cache.KernelCacheFile(str(place), "add-1.py3", "ostinato").load("key") == "code again"


def test_a_full_disk_costs_only_the_cache(home, kernels, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_data", full)
    stored(cache.directory(kernels))


def test_what_many_write_at_once_is_kept_apart(home, kernels):
    """Numba numbers the compiled forms of a function: two writers that took the same number would give one the other's code."""
    place = cache.directory(kernels)
    together = threading.Barrier(8)

    def write(number):
        together.wait()
        for each in range(5):
            stored(place, value=(number, each), key=(number, each))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    file = cache.KernelCacheFile(str(place), "add-1.py3", "ostinato")
    assert all(file.load((number, each)) == (number, each) for number in range(8) for each in range(5))


def test_the_notice_is_given_once_and_only_for_what_is_missing(home, kernels):
    file = stored(cache.directory(kernels))
    said = []
    with cache.announced(said.append):
        file.load("key")
        assert said == []
        file.load("another")
        file.load("a third")
    assert said == [LINE]


def test_the_notice_goes_to_the_log_outside_of_a_start(home, kernels, caplog):
    file = stored(cache.directory(kernels))
    with cache.announced(lambda _: pytest.fail("said to a worker that has started")):
        pass
    with caplog.at_level(logging.INFO):
        file.load("another")
    assert LINE in caplog.text


def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    """The real road: decorated kernels, numba's dispatcher, two processes, another copy of the sources."""
    said = [_compile(tmp_path, root) for root in (PACKAGE.parent, _copied(tmp_path / "clone"))]
    assert said == [f"{LINE}\n", ""]


def _copied(clone: Path) -> Path:
    shutil.copytree(PACKAGE, clone / "ostinato", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return clone


def _compile(directory: Path, sources: Path) -> str:
    """What a process says that calls a small kernel of these sources."""
    environment = os.environ | {"XDG_CACHE_HOME": str(directory / "cache"), "PYTHONPATH": str(sources)}
    environment.pop("NUMBA_CACHE_DIR", None)
    call = "from ostinato.model.kernels import quantize; print(quantize.__file__, quantize.block(48))"
    code = f"import logging; logging.basicConfig(format='%(message)s', level=logging.INFO); {call}"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{sources}/ostinato/model/kernels/quantize.py 16\n"
    return done.stderr
