"""What `ostinato rollout --connect` needs: a taskset and certificates, as options or as settings."""

import pytest

from ostinato.cli import workers
from ostinato.cli.options import Common
from ostinato.core.errors import BadConfig

URL = "https://trainer:8443"
FILES = {"certificate": "me.pem", "key": "me.key", "authority": "ca.pem"}


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The configurations with which a worker was started."""
    configs = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workers, "run_worker", lambda name, config, **_: configs.append(config))
    return configs


def settings(**values):
    return Common(overrides=tuple(f'worlds.{name.replace("__", ".")}="{value}"' for name, value in values.items()))


def paths(tmp_path):
    return {option: tmp_path / f"{option}.pem" for option in ("cert", "key", "ca")}


def test_the_taskset_may_be_an_option(started, tmp_path):
    workers.rollout(world=tmp_path / "tasks.jsonl", connect=URL, **paths(tmp_path))
    assert started[0].worlds.file == str(tmp_path / "tasks.jsonl")
    assert started[0].worlds.connect.key == str(tmp_path / "key.pem")


def test_the_taskset_may_be_a_setting(started, tmp_path):
    workers.rollout(connect=URL, **paths(tmp_path), common=settings(file="tasks.jsonl"))
    assert (started[0].worlds.file, started[0].learn.source) == ("tasks.jsonl", "worlds")


def test_the_certificates_may_be_settings(started, tmp_path):
    common = settings(**{f"connect__{name}": file for name, file in FILES.items()})
    workers.rollout(world=tmp_path / "tasks.jsonl", connect=URL, common=common)
    assert started[0].worlds.connect.model_dump() == {"url": URL, **FILES}


@pytest.mark.parametrize("missing", ["world", "cert", "key", "ca"])
def test_without_one_of_them_nothing_starts(started, tmp_path, missing):
    options = {"world": tmp_path / "tasks.jsonl", **paths(tmp_path)}
    del options[missing]
    with pytest.raises(BadConfig, match="--connect needs a taskset and this worker's certificates"):
        workers.rollout(connect=URL, **options)
    assert not started
