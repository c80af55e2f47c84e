import os
import stat

import pytest

from ostinato.core.private import make_private, private, replace_text


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
    replace_text(tmp_path / "text", "told")
    assert (tmp_path / "text").read_text() == "told"
    assert mode(tmp_path / "lines") == mode(tmp_path / "text") == 0o600


def test_a_file_is_replaced_by_a_narrower_one(tmp_path):
    path = tmp_path / "text"
    path.write_text("old")
    (tmp_path / f"text.{os.getpid()}.partial").write_text("half")
    replace_text(path, "new")
    assert (path.read_text(), mode(path)) == ("new", 0o600)
    assert [each.name for each in tmp_path.iterdir()] == ["text"]


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
