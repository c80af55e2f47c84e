"""A run that moves to another weight store: its weights are copied as files, and are never replaced by the starting model."""

import boto3
import pytest
from tests.fakes.s3_server import BUCKET, KNOWN, REGION, s3_options, s3_server

from ostinato.app.gateway import branch_versions, journal_of
from ostinato.app.storage import open_run
from ostinato.config import load
from ostinato.core.errors import BadConfig, Unauthorized, Unavailable
from ostinato.core.records import PolicyVersion
from ostinato.launch.workers.prepare import prepare
from ostinato.launch.workers.serve import _prepared
from ostinato.model.backend import ComputeBackend
from ostinato.model.load import load_model
from ostinato.testing.tiny import tiny_model


@pytest.fixture(scope="module")
def bucket():
    with s3_server() as url:
        yield url


def settings(tmp_path, *more):
    words = [f"run.directory={tmp_path / 'run'}", f"model.source={tmp_path / 'model'}", "model.dtype='float32'", *more]
    return load(None, words)


def in_bucket(tmp_path, server, prefix):
    options = [f"weights.options.{name}='{value}'" for name, value in s3_options(server).items()]
    return settings(tmp_path, f"weights.url=s3://{BUCKET}/{prefix}", *options)


async def released(tmp_path):
    """A run with a release; returns its live version."""
    tiny_model(tmp_path / "model")
    with open_run(settings(tmp_path)) as run:
        await prepare(run, lambda _: None)
        return await run.follower.resolve("live")


async def test_a_run_with_releases_does_not_start_over_in_an_empty_store(bucket, tmp_path):
    live = await released(tmp_path)
    with open_run(in_bucket(tmp_path, bucket, "empty")) as run:
        with pytest.raises(BadConfig, match=r"has releases.*s3://weights/empty has no version.*weights\.url"):
            await prepare(run, lambda _: None)
        assert await run.store.list_refs() == {}
    with open_run(settings(tmp_path)) as run:
        await prepare(run, lambda _: None)
        assert await run.follower.resolve("live") == live


async def test_its_weights_move_to_a_bucket_file_by_file(bucket, tmp_path):
    live = await released(tmp_path)
    client, store = boto3.client("s3", endpoint_url=bucket, region_name=REGION, **KNOWN), tmp_path / "run" / "weights"
    for part in ("objects", "refs"):
        for file in filter(lambda found: found.is_file(), (store / part).rglob("*")):
            client.upload_file(str(file), BUCKET, f"moved/{file.relative_to(store)}")
    with open_run(in_bucket(tmp_path, bucket, "moved")) as run:
        await prepare(run, lambda _: None)
        assert await run.follower.resolve("live") == live
        await run.store.move_ref("live", await run.store.read_ref("live"), await run.store.read_ref("base"))


async def test_the_starting_model_is_read_with_the_kernels_of_the_run(tmp_path, monkeypatch):
    """Others would be compiled, on the first start, to try a model that they never compute."""
    read = []

    def reading(path, dtype, *, backend):
        read.append(backend)
        return load_model(path, dtype, backend=backend)

    monkeypatch.setattr("ostinato.model.load.load_model", reading)
    tiny_model(tmp_path / "model")
    with open_run(settings(tmp_path, "model.kernels=torch", "model.numerics=fast")) as run:
        await prepare(run, lambda _: None)
    assert read == [ComputeBackend(device="cpu", kernels="torch")]


@pytest.mark.parametrize("error", [Unavailable("no answer"), Unauthorized("its credentials have run out")])
async def test_a_gateway_that_has_a_cache_starts_while_the_store_is_away_or_refuses_us(tmp_path, monkeypatch, error):
    tiny_model(tmp_path / "model")
    config = settings(tmp_path, f"follow.cache={tmp_path / 'cache'}")
    journal_of(config).have("live", PolicyVersion(number=0, hash="ab" * 32))

    async def refused(_):
        raise error

    with open_run(config) as run:
        monkeypatch.setattr(run.store, "read_ref", refused)
        assert await _prepared(run, lambda _: None) == tmp_path / "model"
        assert await branch_versions(run) == 0
