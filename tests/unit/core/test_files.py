import os
import stat

import pytest

from ostinato.core import files
from ostinato.core.files import install_directory, make_private, private, write_atomic


@pytest.fixture(autouse=True)
def wide_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_new_files_are_their_owners_alone_whatever_the_umask(tmp_path):
    with open(tmp_path / "lines", "a", opener=private) as file:
        file.write("one\n")
    write_atomic(tmp_path / "text", "told", durable=False)
    assert (tmp_path / "text").read_text() == "told"
    assert mode(tmp_path / "lines") == mode(tmp_path / "text") == 0o600


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_by_a_narrower_one(tmp_path, durable):
    path = tmp_path / "text"
    path.write_text("old")
    write_atomic(path, "new", durable=durable)
    assert (path.read_text(), mode(path)) == ("new", 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["text"]


def test_a_mode_is_narrowed_by_the_umask(tmp_path):
    os.umask(0o077)
    write_atomic(tmp_path / "narrow", b"x", durable=False, mode=0o644)
    assert mode(tmp_path / "narrow") == 0o600


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "text"
    path.write_text("old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new", durable=True)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["text"]


@pytest.fixture
def calls(monkeypatch):
    """What is synced and renamed, in order."""
    seen, real = [], os.open

    def opened(path, flags, mode=0o777):
        descriptor = real(path, flags, mode)
        names[descriptor] = os.path.basename(path)
        return descriptor

    names = {}
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(
        os,
        "fsync",
        lambda descriptor: seen.append(names[descriptor].split(".")[1 if names[descriptor][0] == "." else 0]),
    )
    replace = files.Path.replace
    monkeypatch.setattr(files.Path, "replace", lambda self, to: (seen.append(f"-> {to.name}"), replace(self, to)))
    return seen


def test_a_durable_file_is_synced_before_its_name_and_the_name_before_anybody_is_told(tmp_path, calls):
    write_atomic(tmp_path / "key", "k", durable=True)
    assert calls == ["key", "-> key", tmp_path.name]
    calls.clear()
    write_atomic(tmp_path / "key", "k", durable=False)
    assert calls == ["-> key"]


def test_a_directory_is_installed_once_all_that_it_holds_is_on_the_disk(tmp_path, calls):
    partial = tmp_path / "partial"
    (partial / "folder").mkdir(parents=True)
    (partial / "folder" / "inner").write_text("1")
    (partial / "outer").write_text("2")
    (tmp_path / "model").mkdir()  # empty, as a person made it
    install_directory(partial, tmp_path / "model")
    assert sorted(calls[:4]) == ["folder", "inner", "outer", "partial"]
    assert calls[4:] == ["-> model", tmp_path.name]
    assert (tmp_path / "model" / "folder" / "inner").read_text() == "1"


def test_a_directory_is_made_for_its_owner_and_closed_if_it_was_open(tmp_path):
    place = tmp_path / "run"
    assert make_private(place) == ""
    assert mode(place) == 0o700
    place.chmod(0o755)
    assert "is closed to them now" in make_private(place)
    assert mode(place) == 0o700
    assert make_private(place) == ""


def test_a_directory_that_holds_more_stays_as_it_is_and_is_named(tmp_path):
    tmp_path.chmod(0o755)
    assert f"chmod 700 {tmp_path}" in make_private(tmp_path, lambda: False)
    assert mode(tmp_path) == 0o755


def test_a_directory_of_somebody_else_is_only_named(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    assert f"belongs to user {os.geteuid()}" in make_private(tmp_path)
    assert mode(tmp_path) == 0o755
