import numpy as np
import pytest
from rich.console import Console

from ostinato.app.storage import open_cached_store, open_log, open_store
from ostinato.config import load
from ostinato.core.errors import BadConfig, NotFound
from ostinato.core.weights import WeightArray
from ostinato.launch.commands.weights import pull, push
from ostinato.weights.publish.publisher import VersionPublisher
from ostinato.weights.relay import RelayStore
from ostinato.weights.store.directory import DirectoryStore
from ostinato.weights.store.readonly import HttpStore


def console() -> Console:
    return Console(record=True, width=200)


@pytest.fixture
async def run(tmp_path):
    config = load(None, [f"run.directory={tmp_path / 'run'}"])
    weights = {"w": WeightArray("U8", (500,), np.arange(500).astype(np.uint8))}
    await VersionPublisher(open_store(config)).publish(3, weights, run="r", base=None, ref="live")
    return config


async def test_a_version_goes_out_and_comes_into_another_run(run, tmp_path):
    url, out = f"file://{tmp_path / 'mirror'}", console()
    await push(run, url, "live", None, (), out)
    text = out.export_text()
    assert "live is at it" in text
    assert "MB/s" in text
    mirror = DirectoryStore(tmp_path / "mirror")
    root = await open_store(run).read_ref("live")
    assert await mirror.read_ref("live") == root
    other = load(None, [f"run.directory={tmp_path / 'other'}"])
    await pull(other, url, "live", "imported", (), console())
    assert await open_store(other).refs() == {
        "imported": root,
        f"version/{root}": await mirror.read_ref(f"version/{root}"),
    }
    again = console()
    await pull(other, url, root, None, (), again)  # by hash: no ref but the version's own
    assert "0 objects" in again.export_text()
    assert len(await open_store(other).refs()) == 2


async def test_the_ledgers_refs_are_not_moved_behind_its_back(run, tmp_path):
    await push(run, str(tmp_path / "mirror"), "live", None, (), console())
    other = load(None, [f"run.directory={tmp_path / 'other'}"])
    open_log(other).close()
    with pytest.raises(BadConfig, match="--to"):
        await pull(other, str(tmp_path / "mirror"), "live", None, (), console())
    assert await open_store(other).refs() == {}
    await pull(other, str(tmp_path / "mirror"), "live", "imported", (), console())


async def test_mistakes_have_a_way_out(run, tmp_path):
    with pytest.raises(NotFound, match="no ref canary"):
        await push(run, str(tmp_path / "mirror"), "canary", None, (), console())
    with pytest.raises(BadConfig, match="key=value"):
        await push(run, "s3://x/y", "live", None, ("aws_region",), console())
    with pytest.raises(BadConfig, match="can only be read"):
        await push(run, "http://127.0.0.1:9", "live", None, (), console())


def test_a_followers_cache_is_a_directory_of_its_own(tmp_path):
    run = f"run.directory={tmp_path / 'run'}"
    assert isinstance(open_cached_store(load(None, [run])), DirectoryStore)
    settings = [run, "weights.url=http://relay:8330", f"follow.cache={tmp_path / 'cache'}"]
    assert isinstance(open_cached_store(load(None, settings)), RelayStore)
    assert isinstance(open_store(load(None, settings)), HttpStore)
    assert (tmp_path / "cache" / "objects").is_dir()
