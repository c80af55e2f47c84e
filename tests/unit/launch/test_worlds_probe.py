"""What `ostinato worlds probe` prints, with and without the task mix."""

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console
from tests.fakes.lookalikes import episodes

from ostinato.core.errors import BadRequest
from ostinato.launch.commands.worlds.fidelity import show_probe
from ostinato.worlds.fidelity.observe import read_observations
from ostinato.worlds.fidelity.paired import match_prompts


@pytest.fixture
def files(tmp_path):
    found = []
    for side, popular in (("p", 3.0), ("s", 0.0)):
        file = tmp_path / f"{side}.jsonl"
        seen = episodes(1, side, 24, popular=popular)
        seen = [
            replace(each, features={name: each.features[name] for name in ("seconds", "prompt.tokens")})
            for each in seen
        ]
        file.write_text("".join(each.line() + "\n" for each in seen))
        found.append(file)
    return found


def told(files, **more):
    out = io.StringIO()
    show_probe(*files, 0, 5, Console(file=out, width=200), **more)
    return out.getvalue()


def test_what_was_shared_and_left_out_is_said(files):
    found = match_prompts(*map(read_observations, files))
    printed, pairs = told(files, same_prompts=True, machine=False), len(found.production)
    assert found.left_out == (72 - pairs, 72 - pairs)
    assert f"{found.prompts} prompts are shared, {pairs} pairs drawn; {72 - pairs} of production" in printed
    assert "the task mix set aside" in printed
    assert "385 independent pairs" in printed


def test_without_it_nothing_is_set_aside(files):
    printed, found = told(files, machine=False), json.loads(told(files, machine=True))
    assert "set aside" not in printed
    assert (found["prompts"], found["paired"], found["production"]) == (None, False, [72, 24])


def test_files_that_share_nothing_are_refused(files):
    files[1].write_text(files[1].read_text().replace('"asked": "q', '"asked": "other'))
    with pytest.raises(BadRequest, match="no prompt occurs on both sides"):
        told(files, same_prompts=True, machine=True)
