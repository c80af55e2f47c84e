"""What a configuration leaves unguarded is said at the start and in the status: users nobody proves, and users nobody watches."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.launch.test_overview import RUN, drawn

from ostinato.config import load
from ostinato.launch.commands import up as command
from ostinato.launch.commands.status import as_json
from ostinato.status.config_warnings import config_warnings, unproven_users, unwatched_users

ONE = "acme:ka-0123456789abcdef"
TWO = f'["{ONE}", "bolt:kb-0123456789abcdef"]'


def config(tmp_path, *words):
    return load(None, [f"run.directory={tmp_path / 'run'}", *words])


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ([], False),
        ([f'serve.api_keys=["{ONE}", "acme:kc-0123456789abcdef"]'], False),
        ([f"serve.api_keys={TWO}"], True),
        ([f'serve.api_keys=["{ONE}", "kd-0123456789abcdef"]'], True),
        ([f"serve.api_keys={TWO}", "reward.users=verified"], False),
        (["serve.api_keys_file=/nowhere"], False),
    ],
)
def test_only_several_tenants_with_declared_users_are_warned_of(tmp_path, words, warned):
    said = unproven_users(config(tmp_path, *words))
    assert bool(said) == warned
    assert all(word in said for word in ("reward.users", "serve.user_keys", "2 tenants")) or not warned


@pytest.mark.parametrize("keys", [f'["{ONE}"]', TWO])
@pytest.mark.parametrize("suite", ["", "demo"])
async def test_the_start_says_so(tmp_path, monkeypatch, keys, suite):
    class Begun(Exception):
        pass

    def launching(*_):
        raise Begun

    async def fine(*_, **__):
        pass

    monkeypatch.setattr(command, "check_start", fine)
    monkeypatch.setattr(command, "_launching", launching)
    out = io.StringIO()
    with pytest.raises(Begun):
        await command.up(
            config(tmp_path, f"serve.api_keys={keys}", f"evaluate.suite={suite!r}"), Console(file=out, width=500)
        )
    assert ("one key can pose as any number of users" in out.getvalue()) == (keys == TWO)
    assert ("Nothing watches users" in out.getvalue()) == bool(suite)


def test_status_says_so(tmp_path):
    said = unproven_users(config(tmp_path, f"serve.api_keys={TWO}"))
    assert "reward.users" not in drawn(RUN)
    warned = replace(RUN, warnings={"train": said})
    assert "one key can pose as any number of users" in drawn(warned)
    assert (as_json(RUN)["unproven_users"], as_json(warned)["unproven_users"]) == (None, said)
    assert (as_json(RUN)["warnings"], as_json(warned)["warnings"]) == ([], [said])


SHIPS = "evaluate.suite=demo"


@pytest.mark.parametrize(
    ("words", "warned"),
    [
        ([SHIPS], True),
        ([], False),
        ([SHIPS, "release.approval=manual"], False),
        ([SHIPS, "learn.source=worlds"], False),
        ([SHIPS, "release.canary=true"], False),
        ([SHIPS, "serve.control_share=0.05"], False),
    ],
)
def test_a_run_that_ships_by_itself_and_watches_nobody_is_warned_of(tmp_path, words, warned):
    settings = config(tmp_path, *words)
    assert bool(unwatched_users(settings)) == warned
    assert ("release" in config_warnings(settings)) == warned
