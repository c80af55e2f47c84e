"""`ostinato doctor` asks the Postgres of `record.url`, and makes nothing there."""

import pytest

from ostinato.app.storage import open_log
from ostinato.config import load
from ostinato.core.errors import BadConfig, Unavailable
from ostinato.launch.commands.doctor import CHECKS

look = dict(CHECKS)["log"]


def test_a_log_in_postgres_is_looked_for_and_not_made(in_postgres, tmp_path):
    record = in_postgres()
    config = load(None, [f"run.directory='{tmp_path / 'run'}'"]).model_copy(update={"record": record})
    assert "the log is created at the first start" in look(config)
    assert "the log is created at the first start" in look(config), "looking made it"
    open_log(config).close()
    assert look(config).endswith(f"(schema {record.namespace})")


def test_a_server_that_is_away_is_told_with_the_remedy():
    pytest.importorskip("psycopg")
    away = ["record.url='postgresql://ann@127.0.0.1:1/loop'", "record.append_s=0.1"]  # nothing listens there
    with pytest.raises(Unavailable, match="see whether its server runs"):
        look(load(None, away))
    with pytest.raises(BadConfig, match="set it to 'none'"):
        look(load(None, [*away, "record.encrypt=user"]))
