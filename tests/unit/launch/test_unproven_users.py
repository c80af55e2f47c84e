"""Several tenants whose users nobody proves are warned of, and nobody else."""

import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.launch.test_overview import RUN, drawn

from ostinato.config import load
from ostinato.launch.commands import up as command
from ostinato.launch.commands.status import as_json
from ostinato.status.tenants import unproven_users

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
async def test_the_start_says_so(tmp_path, monkeypatch, keys):
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
        await command.up(config(tmp_path, f"serve.api_keys={keys}"), Console(file=out, width=500))
    assert ("one key can pose as any number of users" in out.getvalue()) == (keys == TWO)


def test_status_says_so(tmp_path):
    said = unproven_users(config(tmp_path, f"serve.api_keys={TWO}"))
    assert "reward.users" not in drawn(RUN)
    assert "one key can pose as any number of users" in drawn(replace(RUN, unproven=said))
    assert (as_json(RUN)["unproven_users"], as_json(replace(RUN, unproven=said))["unproven_users"]) == (None, said)
