import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from ostinato.app.storage import Home, home, open_store, operator_key, serving_run
from ostinato.config import load
from ostinato.core.errors import BadConfig, StorageFull
from ostinato.weights.store.bucket import BucketStore
from ostinato.weights.store.directory import DirectoryStore


def test_weights_lie_in_the_run_unless_a_url_says_otherwise(tmp_path):
    run = f"run.directory={tmp_path / 'run'}"
    inside = open_store(load(None, [run]))
    assert isinstance(inside, DirectoryStore)
    assert (tmp_path / "run" / "weights" / "objects").is_dir()
    for url in (str(tmp_path / "elsewhere"), f"file://{tmp_path / 'there'}"):
        assert isinstance(open_store(load(None, [run, f"weights.url={url}"])), DirectoryStore)
    assert (tmp_path / "elsewhere" / "objects").is_dir()
    assert (tmp_path / "there" / "objects").is_dir()
    bucket = load(None, [run, "weights.url=s3://versions/run-7", "weights.options.aws_region=eu-west-1"])
    assert isinstance(open_store(bucket), BucketStore)


def test_the_key_is_made_once_and_is_its_owners(tmp_path):
    place = Home(tmp_path)
    key = place.admin_key()
    assert len(key) == 43
    assert place.admin_key() == key
    assert stat.S_IMODE((tmp_path / "admin.key").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == [".admin-key.lock", "admin.key"]


def test_hosts_share_a_key_by_setting_it(tmp_path):
    run = f"run.directory={tmp_path / 'run'}"
    assert operator_key(load(None, [run])) == Home(tmp_path / "run").admin_key()
    assert operator_key(load(None, [run, "serve.admin_key=shared-0123456789abcdef"])) == "shared-0123456789abcdef"


def test_the_run_that_serves_a_branch_is_found_from_the_directory_of_branches_too(tmp_path, monkeypatch):
    branches = tmp_path / "run" / "branches"
    branches.mkdir(parents=True)
    monkeypatch.chdir(branches)
    config = load(None, ["run.directory=acme", "run.tenant=acme"])
    assert serving_run(config).run.directory == tmp_path / "run"


@pytest.mark.parametrize("left", [b"", b"\n", b"shortened", b"\xff" * 43, b"x" * 400])
def test_half_a_key_is_replaced_by_a_whole_one(tmp_path, left):
    (tmp_path / "admin.key").write_bytes(left)
    key = Home(tmp_path).admin_key()
    assert len(key) == 43
    assert Home(tmp_path).admin_key() == key


def test_all_who_ask_at_once_get_the_same_key(tmp_path):
    (tmp_path / "admin.key").write_bytes(b"")
    program = f"from pathlib import Path\nfrom ostinato.app.storage import Home\nprint(Home(Path({str(tmp_path)!r})).admin_key())"
    ask = [sys.executable, "-c", program]
    with ThreadPoolExecutor(3) as pool:
        keys = set(pool.map(lambda _: subprocess.run(ask, capture_output=True, text=True, check=True).stdout, range(3)))
    assert len(keys) == 1


def test_a_kill_while_it_is_written_leaves_no_half_key(tmp_path):
    """The process dies at each write, sync and rename on the way."""
    for call in ("open", "fsync", "replace"):
        place = tmp_path / call
        place.mkdir()
        program = f"""
import os, signal
from pathlib import Path
from ostinato.app.storage import Home
from ostinato.core import files
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
if {call!r} == "replace":
    Path.replace = die
elif {call!r} == "fsync":
    os.fsync = die
else:
    files.open = die
Home(Path({str(place)!r})).admin_key()
"""
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
        assert len(Home(place).admin_key()) == 43


def test_a_directory_that_cannot_be_made_is_told_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageFull, match=r"run.directory .* cannot be created: .*name another place"):
        home(load(None, [f"run.directory={tmp_path / 'file' / 'run'}"]))


def test_where_things_lie_is_told_without_loading_what_opens_them():
    heavy = ("torch", "numba", "scipy", "obstore", "aiohttp")
    program = (
        f"import sys, ostinato.app.storage, ostinato.app.evaluation; print([m for m in {heavy} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
    assert done.stdout.strip() == "[]"


def test_a_key_that_everybody_may_read_is_refused_with_the_remedy(tmp_path):
    key = Home(tmp_path).admin_key()
    path = tmp_path / "admin.key"
    path.chmod(0o604)
    with pytest.raises(BadConfig, match=f"every user may access {path}.*delete it.*chmod 600") as told:
        Home(tmp_path).admin_key()
    assert key not in str(told.value)
    path.unlink()
    assert Home(tmp_path).admin_key() != key


def test_a_run_of_an_earlier_version_is_closed_to_other_users(tmp_path, caplog):
    config = load(None, [f"run.directory={tmp_path / 'run'}"])
    for directory in (tmp_path / "run", tmp_path / "run" / "weights", tmp_path / "run" / "logs"):
        directory.mkdir(mode=0o755)
    open_store(config)
    for directory in (tmp_path / "run", tmp_path / "run" / "weights"):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert f"could enter {directory}" in caplog.text
    caplog.clear()
    open_store(config)
    assert not caplog.records


def test_a_directory_with_other_things_is_not_closed_to_their_users(tmp_path, caplog):
    (tmp_path / "public_html").mkdir()
    tmp_path.chmod(0o755)
    home(load(None, [f"run.directory={tmp_path}"]))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert "give the run a directory of its own" in caplog.text
