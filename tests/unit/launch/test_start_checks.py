"""What `ostinato up` refuses before any worker is started, and what it leaves to the nodes of a cluster."""

import pytest

from ostinato.config import load
from ostinato.core.errors import BadConfig
from ostinato.launch.commands.checks import check_start
from ostinato.launch.commands.demo import check_emptied, empty
from ostinato.testing.tiny import tiny_model

URL = "record.url='postgresql://ann@db/loop'"


@pytest.fixture
def settings(tmp_path):
    """The settings of a run on the tiny model, with more of them."""
    model = tiny_model(tmp_path / "model")
    return lambda *more: load(None, [f"model.source='{model}'", f"run.directory='{tmp_path / 'run'}'", *more])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["record.url=mysql://db/loop"], "record.url is no URL of Postgres's"),
        (["record.url='postgresql://ann:secret@db/loop'"], "record.url holds a password"),
        ([URL, "record.password_env=OSTINATO_UNSET"], "OSTINATO_UNSET, which is not set"),
        ([URL, "record.encrypt=user"], "record.encrypt is not there for a log in Postgres"),
    ],
)
async def test_settings_of_a_log_in_postgres_are_looked_at_first(settings, more, message):
    pytest.importorskip("psycopg")
    with pytest.raises(BadConfig, match=message):
        await check_start(settings(*more))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["serve.api_keys=['acme:short']"], r"serve.api_keys\[0\] is too weak"),
        (["serve.user_keys=['short']"], r"serve.user_keys\[0\] is too weak"),
        (["serve.admin_key=short"], "serve.admin_key is too weak"),
    ],
)
async def test_keys_that_the_gateway_would_refuse_are_refused_before_it_loads_a_model(settings, more, message):
    with pytest.raises(BadConfig, match=message):
        await check_start(settings(*more))


async def test_so_is_a_weak_key_in_a_file(settings, tmp_path):
    file = tmp_path / "keys"
    file.touch(0o600)
    file.write_text("# one a line\nacme:short\n")
    with pytest.raises(BadConfig, match=r"serve\.api_keys_file, key 1 is too weak"):
        await check_start(settings(f"serve.api_keys_file='{file}'"))


async def test_a_server_is_not_asked(settings):
    pytest.importorskip("psycopg")
    await check_start(settings(URL))


async def test_what_another_node_has_is_not_looked_for_on_the_machine_of_up(settings):
    elsewhere = settings(URL, "record.password_env=OSTINATO_UNSET", "model.device='cuda:99'", "model.numerics=fast")
    with pytest.raises(BadConfig, match="cuda:99"):
        await check_start(elsewhere)
    await check_start(elsewhere, on_ray=True)


def test_a_demo_keeps_the_cache_that_lies_in_its_run(settings):
    """Where no home can be written, the converted model and compiled kernels of the last demo lie there."""
    config = settings()
    cached = config.run.directory / ".cache" / "ostinato"
    cached.mkdir(parents=True)
    check_emptied(config)
    (config.run.directory / "log").mkdir()
    with pytest.raises(BadConfig, match="not empty"):
        check_emptied(config)
    empty(config.run.directory)
    assert cached.is_dir()
    assert not (config.run.directory / "log").exists()
    check_emptied(config)
