"""`ostinato doctor` says whom a run's settings let it forget, in words and in weights."""

import pytest

from ostinato.config import load
from ostinato.launch.commands.doctor import CHECKS
from ostinato.record.log import SqlLog

look = dict(CHECKS)["erasure"]


def config(tmp_path, *given):
    return load(None, [f"run.directory='{tmp_path / 'run'}'", *given])


def test_without_encryption_nobody_can_be_forgotten(tmp_path):
    assert look(config(tmp_path)) == "record.encrypt is 'none': nobody can be forgotten"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "a replay can erase anybody from the weights"),
        (("learn.checkpoint_ladder=6", "learn.checkpoint_every=5"), "up to 320 steps"),
        (("record.retain_days=30",), "warning: record.retain_days = 30: once rows are dropped, no replay can"),
    ],
)
def test_the_settings_decide_what_a_replay_can_promise(tmp_path, given, said):
    assert said in look(config(tmp_path, "record.encrypt='user'", *given))


def test_rows_that_were_dropped_are_a_warning(tmp_path, monkeypatch):
    made = config(tmp_path, "record.encrypt='user'")
    (tmp_path / "run" / "log").mkdir(parents=True)
    SqlLog.open(tmp_path / "run" / "log", lambda: 0.0, made.record).close()

    async def horizon(_: SqlLog) -> int:
        return 812

    monkeypatch.setattr(SqlLog, "horizon", horizon)
    assert "warning: rows up to 812 were dropped" in look(made)
