import hashlib
import io
import random
import tarfile
import time
import zipfile
from pathlib import Path

import pytest
from tests.fakes.tiny_package import tiny_files, tiny_sdist

from ostinato.core.errors import BadRequest, Corrupt, TooLarge
from ostinato.worlds.building import sources
from ostinato.worlds.building.sources import (
    check_sha256,
    installed,
    is_test,
    plain_requirement,
    read_tree,
    unpack,
    without_top,
)


def test_a_source_distribution_is_read_and_stripped():
    tree = read_tree(without_top(unpack(tiny_sdist(), "tiny_counts-1.0.tar.gz")), "tiny-counts")
    assert (tree.name, tree.version, tree.root, tree.modules) == ("tiny-counts", "1.0", "", ("tiny_counts",))
    assert tree.tests == ("tests",)
    assert sorted(tree.files) == ["tests/test_counts.py", "tiny_counts.py"]  # no copy of the answer in build/ or .git
    assert list(tree.sources()) == ["tiny_counts.py"]


@pytest.mark.parametrize("path", ["../evil.py", "a/../../evil.py", "/etc/evil", "a\\..\\evil"])
def test_a_path_that_leads_out_is_refused(path):
    with pytest.raises(BadRequest, match="leads out"):
        unpack(tiny_sdist({path: b"x"}, top=""), "a.tar.gz")


def test_links_and_devices_are_left_out():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
            entry = tarfile.TarInfo("top/" + kind.decode())
            entry.type, entry.linkname = kind, "/etc/passwd"
            archive.addfile(entry)
    assert unpack(buffer.getvalue(), "a.tar.gz") == {}


def test_sizes_are_bounded(monkeypatch):
    monkeypatch.setattr(sources, "FILE_BYTES", 10)
    with pytest.raises(TooLarge):
        unpack(tiny_sdist({"a": b"x" * 11}), "a.tar.gz")
    monkeypatch.setattr(sources, "ALL_BYTES", 15)
    with pytest.raises(TooLarge):
        unpack(tiny_sdist({"a": b"x" * 8, "b": b"x" * 8}), "a.tar.gz")


def test_a_header_is_not_held_whatever_size_it_states(monkeypatch):
    entry = tarfile.TarInfo("top/pax")
    entry.type, entry.size = tarfile.XHDTYPE, 1 << 40
    said = 0

    class Endless(io.RawIOBase):
        def read(self, size=-1):
            nonlocal said
            data = entry.tobuf(tarfile.GNU_FORMAT) if not said else bytes(size)
            said += len(data)
            return data

    monkeypatch.setattr(sources, "_PACKED", ((b"\x1f\x8b", lambda _: Endless()),))
    with pytest.raises(TooLarge, match="headers"):
        unpack(b"\x1f\x8b", "a.tar.gz")
    assert said < 128 << 20


def test_a_zip_of_very_many_entries_is_refused_before_they_are_listed(monkeypatch):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(50):
            archive.writestr(f"top/{number}/", "")
    monkeypatch.setattr(sources, "MAX_FILES", 24)
    with pytest.raises(TooLarge, match="24 files"):
        unpack(buffer.getvalue(), "a.zip")


@pytest.mark.parametrize("packed", ["gz", "bz2", "xz", "zip"])
def test_damage_is_named(packed):
    text = "".join(f"{number * number}\n" for number in range(3000)).encode()
    buffer = io.BytesIO()
    if packed == "zip":
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("top/a\u00fc.py", text)
    else:
        with tarfile.open(fileobj=buffer, mode=f"w:{packed}") as archive:
            entry = tarfile.TarInfo("top/a.py")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    whole, chance = buffer.getvalue(), random.Random(packed)
    name = "a.zip" if packed == "zip" else f"a.tar.{packed}"
    assert unpack(whole, name).popitem()[1] == text
    refused = 0
    for _ in range(300):
        data = bytearray(whole[: chance.choice([len(whole), chance.randrange(len(whole))])])
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            unpack(bytes(data), name)
        except BadRequest:  # TooLarge is one
            refused += 1
    assert refused > 100


def test_what_is_no_archive_is_refused():
    with pytest.raises(BadRequest, match="not a readable archive"):
        unpack(b"nothing", "a.tar.gz")


def test_a_wrong_hash_is_corrupt():
    check_sha256(b"a", hashlib.sha256(b"a").hexdigest(), "a")
    with pytest.raises(Corrupt):
        check_sha256(b"b", hashlib.sha256(b"a").hexdigest(), "a")


def test_what_pytest_imports_is_refused():
    files = {**tiny_files(), "PKG-INFO": b"Name: pluggy\nVersion: 1\n"}
    with pytest.raises(BadRequest, match="pytest itself"):
        read_tree(files, "pluggy")


@pytest.mark.parametrize(
    "metadata",
    [
        b"Name: ../../../evil\nVersion: 1\n",
        b"Name: /etc/evil\nVersion: 1\n",
        b"Name: tiny-counts\nVersion: 1/../../evil\n",
        b"Name: tiny-counts\nVersion: " + b"1" * 300 + b"\n",
        b"Version: 1\n",
    ],
)
def test_a_name_and_a_version_that_are_no_part_of_a_path_are_refused(metadata):
    with pytest.raises(BadRequest, match="PKG-INFO states"):
        read_tree({**tiny_files(), "PKG-INFO": metadata}, "tiny-counts")


@pytest.mark.parametrize(
    "pyproject",
    [b"a = " + b"[" * 100_000, b"[dependency-groups]\ntest = 5\n", b'[dependency-groups]\ntest = "six"\n'],
)
def test_a_description_that_nobody_can_use_is_passed_over(pyproject):
    assert read_tree({**tiny_files(), "pyproject.toml": pyproject}, "tiny-counts").test_requires == ()


def test_a_package_without_tests_is_refused():
    with pytest.raises(BadRequest, match="no tests"):
        read_tree({"PKG-INFO": tiny_files()["PKG-INFO"], "tiny_counts.py": b""}, "tiny-counts")


def test_requirements_of_tests_are_found_without_running_anything():
    metadata = (
        b"Name: tiny-counts\nVersion: 1\nRequires-Dist: six\n"
        b"Requires-Dist: freezegun; extra == 'test'\nRequires-Dist: sphinx; extra == 'docs'\n"
    )
    tree = read_tree({**tiny_files(), "PKG-INFO": metadata}, "tiny-counts")
    assert (tree.requires, tree.test_requires) == (("six",), ("freezegun",))


def test_long_white_space_in_a_marker_takes_no_time():
    info = (
        b"Name: tiny-counts\nVersion: 1\nRequires-Dist: freezegun;"
        + b" " * 400
        + b"os_name == 'posix' and extra == 'test'\n"
    )
    began = time.monotonic()
    tree = read_tree({**tiny_files(), "PKG-INFO": info}, "tiny-counts")
    assert tree.test_requires == ("freezegun; os_name == 'posix'",)
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize(
    "text", ["https://x.org/a.whl", "--index-url=http://x", "../a", "a @ https://x.org", "-r a.txt", ""]
)
def test_only_plain_requirements_reach_pip(text):
    assert not plain_requirement(text)


@pytest.mark.parametrize("text", ["six", "pytest>=8; python_version >= '3.8'", "a[b,c]==1.0"])
def test_plain_requirements(text):
    assert plain_requirement(text)


def test_a_wheel_installs_no_script_and_nothing_that_starts_by_itself():
    wheel = {
        "a.py": b"",
        "a-1.data/scripts/run": b"",
        "a-1.data/purelib/b.py": b"",
        "evil.pth": b"import os",
        "c/evil.pth": b"",
    }
    assert sorted(installed(wheel)) == ["a.py", "b.py"]


def test_tests_are_told_from_sources():
    assert all(map(is_test, ["tests/a.py", "pkg/tests/a.py", "pkg/test_a.py", "conftest.py", "a_test.py"]))
    assert not any(map(is_test, ["pkg/a.py", "pkg/contest.py", "latest/a.py"]))


async def test_the_wheels_of_a_task_are_bounded_together(monkeypatch):
    async def download(*words):
        directory = Path(words[words.index("--dest") + 1])
        for number in range(4):
            with zipfile.ZipFile(directory / f"w{number}.whl", "w") as archive:
                archive.writestr(f"module{number}.py", b"x" * 1_000)

    monkeypatch.setattr(sources, "_pip", download)
    assert len(await sources.fetch_wheels(["tabulate"])) == 4
    monkeypatch.setattr(sources, "MAX_BYTES", 3_500)
    with pytest.raises(BadRequest, match="wheels of tabulate hold more than"):
        await sources.fetch_wheels(["tabulate"])
