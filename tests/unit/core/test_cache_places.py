"""Where caches and temporary files go, on machines where the usual places cannot be written."""

import os
import stat
import tempfile
from pathlib import Path

import pytest

from ostinato.core.errors import BadConfig
from ostinato.core.places import cache_directory, ensure_writable, expanded


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home and a directory for temporary files of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", "")  # as if it were not set, and restored afterwards
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "home"


def closed(monkeypatch, tmp_path):
    """A home below a file: nobody, not even root, can make a directory there."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "file"))


def test_the_home_is_used_and_made_for_this_user_alone(home):
    assert cache_directory() == home / ".cache" / "ostinato"
    assert stat.S_IMODE((home / ".cache" / "ostinato").stat().st_mode) == 0o700


def test_a_variable_names_another_cache_for_the_model_too(home, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    assert cache_directory() == tmp_path / "kept" / "ostinato"
    assert expanded(Path("~/.cache/ostinato")) == tmp_path / "kept" / "ostinato"
    assert expanded(Path("~/models")) == home / "models"
    assert expanded(Path("/models")) == Path("/models")


def test_a_relative_variable_is_ignored_as_its_standard_says(home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "kept")
    assert cache_directory() == home / ".cache" / "ostinato"


@pytest.mark.parametrize("place", ["file", "/proc"])
def test_a_run_keeps_what_the_home_cannot_and_says_it_once(home, tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / place))
    (line,) = ensure_writable(tmp_path / "run")
    kept = tmp_path / "run" / ".cache" / "ostinato"
    assert f"{tmp_path / place}/.cache/ostinato cannot be written" in line
    assert str(kept) in line
    assert cache_directory() == expanded(Path("~/.cache/ostinato")) == kept
    assert os.environ["XDG_CACHE_HOME"] == str(kept.parent), "children must find it, too"
    assert ensure_writable(tmp_path / "run") == []


def test_a_user_without_a_home(home, tmp_path, monkeypatch):
    monkeypatch.setattr(
        os.path, "expanduser", lambda path: os.fspath(path)
    )  # as for a number without an entry in passwd
    (line,) = ensure_writable(tmp_path / "run")
    assert str(tmp_path / "run" / ".cache" / "ostinato") in line
    assert expanded(Path("~/.cache/ostinato")) == tmp_path / "run" / ".cache" / "ostinato"


def test_nothing_is_said_or_made_where_the_home_can_be_written(home, tmp_path):
    assert ensure_writable(tmp_path / "run") == []
    assert not (tmp_path / "run").exists()


def test_a_model_in_a_cache_that_can_only_be_read_is_found(home, tmp_path, monkeypatch):
    model = home / ".cache" / "ostinato" / "some-model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    real = os.access
    shut = home / ".cache" / "ostinato"
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != shut and real(path, mode))
    assert ensure_writable(tmp_path / "run")
    assert (cache_directory() / "some-model" / "config.json").read_text() == "{}"


def test_without_home_and_run_it_is_a_private_directory_among_temporary_files(home, tmp_path, monkeypatch):
    closed(monkeypatch, tmp_path)
    place = cache_directory()
    assert place == tmp_path / "tmp" / f"ostinato-{os.getuid()}"
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_a_link_that_another_user_could_have_put_among_temporary_files_is_not_followed(home, tmp_path, monkeypatch):
    closed(monkeypatch, tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tmp" / f"ostinato-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BadConfig, match="set XDG_CACHE_HOME or TMPDIR to a directory of yours"):
        cache_directory()


def test_a_directory_of_another_user_is_not_used(home, tmp_path, monkeypatch):
    place = cache_directory()
    if os.getuid() == 0:
        os.chown(place, 12345, -1)
    else:
        stranger = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: stranger)
    (tmp_path / "tmp" / f"ostinato-{os.getuid()}").write_text("")  # nor can a directory be made here
    with pytest.raises(BadConfig, match="belong to somebody else"):
        cache_directory()


@pytest.mark.parametrize(("mode", "used"), [(0o755, True), (0o775, False), (0o777, False)])
def test_the_systems_directory_is_used_if_no_other_user_can_write_there(home, tmp_path, monkeypatch, mode, used):
    usual = home / ".cache" / "ostinato"
    usual.mkdir(parents=True)
    usual.chmod(mode)
    real = Path.stat

    def of_root(path, **how):
        values = list(real(path, **how))
        if path == usual:
            values[4] = 0
        return os.stat_result(values)

    monkeypatch.setattr(Path, "stat", of_root)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    (tmp_path / "tmp" / "ostinato-12345").write_text("")  # nor can a directory be made here
    if used:
        assert cache_directory() == usual
    else:
        with pytest.raises(BadConfig, match="belong to somebody else"):
            cache_directory()


def test_temporary_files_go_into_the_run_where_no_other_place_can_be_written(home, tmp_path, monkeypatch):
    def none():
        raise FileNotFoundError("No usable temporary directory found")

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "gettempdir", none)
        (line,) = ensure_writable(tmp_path / "run")
    assert tempfile.gettempdir() == os.environ["TMPDIR"] == str(tmp_path / "run" / ".cache" / "tmp")
    assert "set TMPDIR" in line
