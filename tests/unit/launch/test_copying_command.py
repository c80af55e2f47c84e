"""`ostinato log copy` of what is not there: it is said, and nothing is made in its place."""

import io

import pytest
from rich.console import Console

from ostinato.app.storage import Home, log_elsewhere
from ostinato.config import load
from ostinato.core.errors import BadConfig, NotFound
from ostinato.launch.commands.checks import check_log
from ostinato.launch.commands.log import copy_between
from ostinato.run_directory import MARK


def nowhere():
    return Console(file=io.StringIO())


async def test_a_schema_without_a_log_is_no_source_and_is_not_made(in_postgres, tmp_path):
    record = in_postgres()
    config = load().model_copy(update={"record": record})
    with pytest.raises(NotFound, match=r"correct the URL or record\.namespace"):
        await copy_between(config, record.url, str(tmp_path / "back"), nowhere())
    assert not log_elsewhere(record)[1]
    assert not (tmp_path / "back").exists()


async def test_a_directory_whose_log_lies_in_postgres_is_no_source_and_stays_as_it_was(tmp_path):
    place = Home(tmp_path / "run")
    place.log.mkdir(parents=True)
    (place.log / MARK).write_text("loop\n")
    with pytest.raises(BadConfig, match="is in Postgres; name that database"):
        await copy_between(load(), str(place.root), str(tmp_path / "other"), nowhere())
    assert [each.name for each in place.log.iterdir()] == [MARK]
    with pytest.raises(BadConfig, match=r"is in Postgres; name it in record\.url"):  # nor is it started without
        check_log(load(None, [f"run.directory='{place.root}'"]))
